#!/bin/sh
# Prints a line "host:slots" for each available host; an elastic `horovodrun` runs this script once per second.
# The hosts are read from the file hosts.txt, or the file that TRAINING_HOSTS names. Edit it to add and remove hosts. A
# script for a cluster can run a command of the scheduler instead. Without the file, the hosts are two names of this
# machine: Horovod excludes a host on which a rank has failed, so each rank needs a host name of its own.
hosts=${TRAINING_HOSTS:-hosts.txt}
if [ -e "$hosts" ]; then
    exec cat "$hosts"
fi
echo localhost:1
echo 127.0.0.1:1
