"""Devices behind one door (base.py): a GPU through CuPy (cuda.py), or the same kernels run on the CPU (emulated.py)."""
