import gc, ctypes, sys, time, torch, tidegate, threading, tempfile, os, collections
from bench.states import normal_state
from tidegate.storage.sink import SinkStore
from tidegate.storage.local import LocalStore
def rss():
    return int(open('/proc/self/statm').read().split()[1])*4096/2**20
state=normal_state(200<<20, 100, "cuda")
libc=ctypes.CDLL(None)
def run(name, store, n=150, **kw):
    with tidegate.CheckpointEngine(store, keep_last=2, **kw) as e:
        line=[]
        for i in range(n):
            e.save_async(state, step=i); e.wait()
            if i%30==29:
                a=rss(); k=gc.collect(); b=rss(); line.append(f"{a:.1f}/{b:.1f}({k})")
        c0=rss(); libc.malloc_trim(0); c1=rss()
        print(name, line, f"trim {c0:.1f}->{c1:.1f}", flush=True)
for codec in ("raw","ans","auto"):
    run("sink "+codec, SinkStore(), codec=codec)
with tempfile.TemporaryDirectory(dir="/dev/shm") as d:
    run("shm auto", d, n=120, codec="auto")
    run("shm raw buffered", d+"/b", n=120, codec="raw", io="buffered")
