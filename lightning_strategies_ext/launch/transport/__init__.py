"""Transfer of objects and tensors between the main process and workers; does not use Lightning."""
