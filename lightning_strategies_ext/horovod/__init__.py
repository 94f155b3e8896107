"""What `horovod_ext` is made of: the life of Horovod in this process, its collectives, the exchange of gradients."""
