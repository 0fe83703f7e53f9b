"""What people have or paste about their machines, one file a format; each reader gives what was seen, and no more.

`formats` tells them apart, `join` makes one cluster of several. Nothing here knows torch, a GPU or the network.
"""
