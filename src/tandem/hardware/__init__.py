"""What a machine has: profiles of its costs, its processors, limits, disk and operating system."""
