"""Four hosts on one machine: network namespaces with links of chosen bandwidth and delay (root, Linux, iproute2)."""
