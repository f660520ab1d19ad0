"""The native library: C++ behind one C ABI, compiled at install, loaded by ctypes. Knows no torch and no Python."""
