class CpuFeatures:
    vendor: str
    instruction_sets: list[str]
    l1_data_bytes: int
    l2_bytes: int
    l3_bytes: int

def detect_cpu_features() -> CpuFeatures: ...
