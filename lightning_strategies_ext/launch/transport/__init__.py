"""How objects and tensors travel between the main process and workers. It knows no Lightning."""
