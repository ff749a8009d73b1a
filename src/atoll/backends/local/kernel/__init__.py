"""What the local backend asks of the kernel: control groups, id ranges, disks, children, filters."""
