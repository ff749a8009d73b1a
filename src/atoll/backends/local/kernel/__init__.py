"""The local backend's use of the kernel: control groups, id ranges, disks, children, filters."""
