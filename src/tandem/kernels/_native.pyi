class CpuFeatures:
    vendor: str
    instruction_sets: list[str]
    l1_data_bytes: int
    l2_bytes: int
    l3_bytes: int

class ExpertLayout:
    format: int
    group: int
    hidden_size: int
    hidden_cols: int
    inner_rows: int
    inner_cols: int
    is_gated: bool
    up_data: int
    up_scales: int
    down_data: int
    down_scales: int
    up_bias: int
    down_bias: int
    def __init__(self) -> None: ...

class ExpertEngine:
    isa: str
    num_threads: int
    def __init__(self, num_threads: int, isa: str) -> None: ...
    def run(
        self,
        layout: ExpertLayout,
        activation: int,
        alpha: float,
        limit: float,
        offset: float,
        num_experts: int,
        num_tokens: int,
        num_rows: int,
        experts: int,
        row_begin: int,
        row_token: int,
        hidden: int,
        out: int,
        /,
    ) -> None: ...
    def read_all(self, data: int, num_bytes: int, /) -> int: ...
    def multiply(self, is_int8: bool, count_per_thread: int, /) -> int: ...

def detect_cpu_features() -> CpuFeatures: ...
def available_isas() -> list[str]: ...
def advise_huge_pages(data: int, num_bytes: int, /) -> bool: ...
