"""The policy of one sandbox: profile, hosts, mounts, image, network."""
