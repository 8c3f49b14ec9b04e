"""Update rules of a matrix: states in, update out, in fp32, bf16 or INT8."""
