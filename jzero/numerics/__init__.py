"""Matrix products in fp32, 8-bit numbers, and sizes of arrays."""
