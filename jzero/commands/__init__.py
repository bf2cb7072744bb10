"""The commands `jzero NAME`, one file each."""
