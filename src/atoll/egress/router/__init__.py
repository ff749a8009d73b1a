"""The router namespace: links, rules, refused packets."""
