"""Matrix products in fp32 and int8, and sizes of arrays."""
