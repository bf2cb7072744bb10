"""Matrix products in fp32 and int8."""
