"""Masters and moments in host memory or on an SSD, and the thread that updates them."""
