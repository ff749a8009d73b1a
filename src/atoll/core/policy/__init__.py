"""What one sandbox may do: profile, hosts, mounts, image, network."""
