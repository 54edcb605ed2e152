"""The main job, end to end: train, save asynchronously, die, resume, compare."""
