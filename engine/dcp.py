"""tidegate under `torch.distributed.checkpoint`: usable with unmodified `dcp.save`, `dcp.async_save` and `dcp.load`.

import torch.distributed.checkpoint as dcp
from tidegate.dcp import TidegateReader, TidegateWriter

with TidegateWriter("runs/7") as writer:
    dcp.save(state, storage_writer=writer, checkpoint_id="step-1200")
dcp.load(state, storage_reader=TidegateReader("runs/7"))
"""

from .dcp_reader import TidegateReader
from .dcp_stager import TidegateStager
from .dcp_writer import TidegateWriter

__all__ = ["TidegateReader", "TidegateStager", "TidegateWriter"]
