"""How the run is cut over ranks, in which precision, and with which DeepSpeed stage."""

from typing import Literal

from ..registry import RUNNER
from ..section import Derivable, Section, key, same_as


class CompressOptions(Section):
    data: Literal["none", "bf16", "fp16", "int8_block", "top_k"] = key(
        "none",
        "Form in which data parallel ranks send gradients (ZeRO 0 to 2): rounded to 16 bits, to 8 bits in blocks "
        "of 256, or only the largest of every 32. The last two forms add the error to the gradients of the next "
        "step. Sums are in fp32.",
    )
    tensor: Literal["none", "bf16", "fp16", "int8_block"] = key(
        "none",
        "Form in which tensor parallel ranks send activations and their gradients, at the borders of each layer. "
        "Sums are in fp32.",
    )
    pipeline: Literal["none", "bf16", "fp16", "int8_block"] = key(
        "none", "Form in which pipeline stages send activations and their gradients."
    )


class CommunicationOptions(Section):
    table: str | None = key(
        None,
        "machine.yml with the algorithm of each collective by operation, hosts and size, as "
        "`bench/communication.py --tune` writes it. Without it the backend chooses.",
    )
    shared_memory: bool = key(
        True,
        "On CPUs, ranks of one host sum and gather large tensors through memory that they share, and not over "
        "TCP. The account is the same. A line reports hosts where they cannot.",
    )
    compress: CompressOptions = key(CompressOptions, "Collectives in fewer bytes, by axis.")
    island: int | None = key(
        None,
        "Neighbouring ranks that share fast links, for algorithms in two levels and the account. The default is a "
        "host.",
        unit="ranks",
        gt=0,
    )
    pair: int | None = key(
        None,
        "Neighbouring ranks of a host (or island) that share the fastest links, such as the dies of a package, for "
        "algorithms in three levels.",
        unit="ranks",
        gt=1,
    )


class ParallelSection(Section):
    tensor: int = key(
        1,
        "Tensor parallel size: ranks that share each matrix. `tensor: {rows: 4, columns: 2, depth: 2}` is short for "
        "tensor: 4, columns: 2 and depth: 2.",
        unit="ranks",
        gt=0,
    )
    columns: int = key(
        1,
        "Second side of the grid of tensor parallel ranks. A rank has 1 / columns of the residual stream's channels. "
        "Matrices are cut in both directions, over tensor * columns ranks. docs/layouts.md says for which layers.",
        unit="ranks",
        gt=0,
    )
    depth: int = key(
        1,
        "Neighbours among the data and context parallel ranks that share the rows of each matrix of a block, and "
        "gather the whole for each product. It goes with tensor, pipeline and ZeRO 0 to 2. Experts are gathered too, "
        "unless parallel.expert is equal: then tokens travel to them.",
        unit="ranks",
        gt=0,
    )
    pipeline: int = key(1, "Pipeline parallel size: stages that share the layers.", unit="stages", gt=0)
    context: Derivable[int] = key(
        None,
        "Context parallel size: ranks that share the tokens of each sequence. Like data parallel ranks, they hold the "
        "same parameters, but for folded.",
        unit="ranks",
        derived=same_as("parallel.folded"),
        gt=0,
    )
    folded: int = key(
        1,
        "Folded tensor and sequence parallel size: context parallel ranks that share the rows of each matrix too. "
        "Tokens stay where they are, and rows go from rank to rank.",
        unit="ranks",
        gt=0,
    )
    context_method: Literal["auto", "ulysses", "ring", "nested", "gather"] = key(
        "auto",
        "Attention on a sequence that ranks share. ulysses: each rank has all tokens of some heads. ring: keys and "
        "values pass from rank to rank. nested: ulysses among neighbours, in rings. gather: each rank has all keys and "
        "values. auto: ulysses where the ranks divide the heads, else nested or ring.",
    )
    context_ulysses: int | None = key(
        None,
        "nested: neighbours that exchange heads. The default is the largest number that divides both the heads and "
        "the ranks.",
        unit="ranks",
        gt=0,
    )
    context_cut: Literal["auto", "contiguous", "zigzag"] = key(
        "auto",
        "Tokens of a rank. contiguous: a run of neighbours. zigzag: the r-th of 2n runs from both ends, so that causal "
        "attention is the same work for all. auto is zigzag where that balances the work. Results are the same.",
    )
    expert: int = key(
        1,
        "Expert parallel size: data and context parallel ranks (with expert_tensor 1: tensor parallel ones too) "
        "that share the experts of a layer. The rest of the model is not cut by it.",
        unit="ranks",
        gt=0,
    )
    expert_tensor: Derivable[int] = key(
        None,
        "Tensor parallel size inside an expert: that of the model, or 1. With 1, experts are folded over the "
        "tensor axis: each rank has whole experts and works on its share of the tokens.",
        unit="ranks",
        derived=same_as("parallel.tensor"),
        gt=0,
    )
    sequence: bool = key(False, "Sequence parallelism: norms, dropout and residual stream over tensor parallel ranks.")
    async_tensor: bool = key(
        False,
        "Products of tensor parallel ranks that share sequences (parallel.sequence) overlap with the messages "
        "around them, through the memory of NVIDIA GPUs of one host.",
    )
    pipeline_split: Literal["uniform", "parameters", "flops"] | list[int] = key(
        "parameters",
        "How layers are shared by the stages: equal counts, equal parameters, equal work, or a list of the number of "
        "blocks per stage. By work an embedding costs nothing, and a head its product.",
    )
    stages_per_rank: int = key(
        1,
        "Pipeline stages of each rank. Stage s is on rank s mod parallel.pipeline (zbv and dualpipe_v: rank r "
        "has r and 2p - 1 - r), so each micro-batch passes every rank several times. The pipeline's bubble gets "
        "shorter by this factor, and messages between stages more.",
        unit="stages",
        gt=0,
    )
    schedule: str = key(
        "1f1b",
        "Order of forward and backward passes in a pipeline. 1f1b: one of each in turn. interleaved: the same with "
        "several stages per rank. zb_h1: gradients of weights are computed later, where a rank would wait. zbv and "
        "dualpipe_v do so too. Their first and last stage are on one rank. asynchronous works on what has arrived, on "
        "CPUs. Or a CSV file with a row per rank and cells such as 0F0, 2B1 (stage, pass, micro-batch). Sums of "
        "gradients do not depend on it.",
    )
    communication: CommunicationOptions = key(CommunicationOptions, "How collectives are done.")


class OffloadOptions(Section):
    device: Literal["none", "cpu", "nvme"] = key("none", "Where the tensors live.")
    path: str | None = key(None, "Folder on the NVMe drive.")
    pin_memory: bool = key(False, "Use page-locked host memory.")


class ZeroSection(Section):
    stage: Literal[0, 1, 2, 3] = key(
        1,
        "ZeRO stage, with the tensors that data parallel ranks share: 0 nothing, 1 optimizer state, 2 also "
        "gradients, 3 also parameters.",
    )
    offload_optimizer: OffloadOptions = key(OffloadOptions, "Keep optimizer state off the accelerator.")
    offload_parameters: OffloadOptions = key(OffloadOptions, "Keep parameters off the accelerator (stage 3).")
    bucket_size: int = key(500_000_000, "Elements reduced or gathered in one collective.", unit="elements", gt=0)
    reduce: Literal["micro_batch", "step"] = key(
        "micro_batch",
        "Stages 2 and 3: gradients are reduced after each micro-batch, or once per step, which keeps them whole until "
        "then. (Stages 0 and 1 always reduce once per step.)",
    )
    overlap: bool = key(
        False,
        "Stage 3 without pipeline: overlap gradient reduction with the backward pass. Stages 1 and 2 always do, except "
        "where DeepSpeed reduces (docs/communication.md).",
    )
    prefetch_size: int = key(50_000_000, "Stage 3: elements gathered ahead of their use.", unit="elements", ge=0)
    persistent_size: int = key(100_000, "Stage 3: smaller parameters are never partitioned.", unit="elements", ge=0)


class LossScaleOptions(Section):
    initial_power: int = key(16, "The dynamic loss scale starts at 2 to this power.", ge=0)
    window: int = key(1000, "Steps without overflow after which the scale doubles.", unit="steps", gt=0)
    hysteresis: int = key(2, "Overflows tolerated before the scale is halved.", gt=0)
    minimum: float = key(1.0, "The scale never goes below this.", gt=0)
    static: float = key(0.0, "A fixed loss scale. 0 means dynamic.", ge=0)


class PrecisionSection(Section):
    compute: Literal["fp32", "bf16", "fp16"] = key(
        "fp32", "Type of weights and activations. Masters are always fp32. `precision: bf16` is short for this."
    )
    products: Literal["compute", "fp8"] = key(
        "compute", "Factors of matrix products in blocks: numbers of `compute`, or 8-bit ones with a scale per tensor."
    )
    accumulate: Literal["fp32", "bf16", "fp16"] = key("fp32", "Type in which gradients of micro-batches are summed.")
    reduce: Literal["fp32", "bf16", "fp16"] = key("fp32", "Type in which data parallel ranks sum gradients.")
    loss_scale: LossScaleOptions = key(LossScaleOptions, "Loss scaling, used with fp16.")


class ActivationCheckpointing(Section):
    mode: Literal["none", "selective", "full"] = key(
        "none", "Recomputation in the backward pass: nothing, all but matrix products and attention, or whole blocks."
    )
    every: int = key(1, "full: checkpoint every n-th block.", unit="blocks", gt=0)


class BatchOptions(Section):
    """Requests of a job script to the scheduler (`deepy.py --sbatch`, `--print pbs|k8s`)."""

    nodes: int = key(1, "Hosts.", unit="hosts", gt=0)
    time: str | None = key(None, "Time limit, in the scheduler's form (`12:00:00`).")
    account: str | None = key(None, "Account that pays.")
    partition: str | None = key(None, "Partition or queue.")
    qos: str | None = key(None, "Quality of service.")
    cores: int | None = key(None, "Cores per host. null: the partition decides (exclusive hosts).", unit="cores", gt=0)
    memory: str | None = key(None, "Memory per host (`200G`). null: the partition decides, or all of exclusive hosts.")
    requeue: bool = key(True, "Let the scheduler start the job again after a host has failed or the time is up.")
    warning: int = key(300, "USR1 comes this long before the time limit: the run saves and ends.", unit="seconds", ge=0)
    setup: list[str] = key(list, "Shell lines before the start (`module load ...`).")
    options: list[str] = key(list, "Further lines for the scheduler, as it reads them (`--constraint=h100`).")
    image: str = key("megatron:latest", "Container image (Kubernetes).")
    gpus: Literal["nvidia", "amd"] = key("nvidia", "Whose GPUs a pod asks for (Kubernetes).")
    resources: dict[str, int] = key(
        dict, "Further resources of a pod, by the names of device plugins (Kubernetes), such as `rdma/hca: 8`."
    )


class LaunchSection(Section):
    ranks: int | None = key(None, "Processes on each host.", derived="the number of GPUs, or 1 on CPU", gt=0)
    runner: str = key("auto", "Program that starts the ranks.", role=RUNNER, words=("auto",))
    hostfile: str | None = key(None, "File of hosts, one `name slots=N` per line.")
    include: str | None = key(None, "Hosts and slots to use, in DeepSpeed's syntax.")
    exclude: str | None = key(None, "Hosts and slots to exclude, in DeepSpeed's syntax.")
    master_address: str | None = key(None, "Address of rank 0 that all hosts reach.", derived="chosen by the runner")
    master_port: int | None = key(None, "Port of the rendezvous.", derived="a free port", gt=0, le=65535)
    interface: str | None = key(None, "Network interface for collectives.")
    environment: dict[str, str] = key(dict, "Environment variables set for every rank.")
    environment_file: str | None = key(None, "File of `NAME=value` lines, set for every rank. Values are literal.")
    forward: list[str] = key(list, "Names (or patterns such as NCCL_*) of environment variables passed to every rank.")
    grace: float = key(60.0, "Time given to ranks between a stop signal and the kill.", unit="seconds", gt=0)
    heartbeat: float = key(60.0, "A host or launcher that is silent this long counts as lost.", unit="seconds", ge=15)
    start_timeout: float = key(120.0, "Every host must have answered the launcher by then.", unit="seconds", gt=0)
    timeout: float = key(
        1800.0,
        "A collective that takes longer fails the run. So does a save or an upload in which a rank waits longer for "
        "the slowest one.",
        unit="seconds",
        gt=0,
    )
    restarts: int = key(0, "Restart a failed run from its newest intact checkpoint, at most this often.", ge=0)
    restart_delay: float = key(
        10.0, "Pause before the first restart. It doubles with each failure in a row, up to 600.", unit="seconds", ge=0
    )
    spares: int = key(
        0,
        "Hosts kept back, the last ones that were chosen. Where a host is lost or computes wrong values, the run "
        "continues with a spare in its place, with the same ranks.",
        unit="hosts",
        ge=0,
    )
    peers: int | None = key(
        None,
        "Start this number of peers on this machine, and make their names, folder and key (docs/peers.md). They share "
        "its devices.",
        gt=1,
        le=64,
    )
    compare: bool = key(
        False,
        "Before each start, restarts included, measure all hosts and spares as `deepy doctor --compare` does, and "
        "name the slow ones.",
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Accelerator. AMD GPUs are `cuda` to torch.")
    bind: Literal["none", "numa", "cores"] = key("numa", "Cores of a rank: all, those near its GPU, or an equal share.")
    console: Literal["first", "all"] = key("first", "Output shown: of rank 0 or all ranks. Each rank has a log file.")
    check_code: bool = key(True, "Refuse to start on hosts whose source code differs from the launcher's.")
    python: str | None = key(None, "Python interpreter on the hosts. The default is the path of the launcher's own.")
    container: str | None = key(
        None,
        "Container that agents and ranks run in, as TOOL:IMAGE: `apptainer:/images/deepy.sif`, `enroot:NAME`, or with "
        "Slurm `pyxis:nvcr.io#nvidia/pytorch:25.01-py3`.",
    )
    container_mounts: list[str] = key(list, "Folders (or OUTSIDE:INSIDE) in the container, apart from code and run.")
    ssh_port: int | None = key(None, "Port of the ssh servers.", gt=0, le=65535)
    ssh_options: list[str] = key(list, "Options for every ssh, such as `-o` and `IdentityFile=...`.")
    working_directory: str | None = key(None, "Folder in which ranks start.", derived="the current folder")
    batch: BatchOptions = key(BatchOptions, "Requests of a job script to the scheduler.")
