"""Typed launchers, one per .cu: what a kernel takes, checked, and how large its grid is. They speak to a Device, never to CUDA."""
