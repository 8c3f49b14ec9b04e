"""One file per op: Triton kernel, torch reference, one public function that picks by device."""
