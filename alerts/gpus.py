"""Alerts on GPUs and their machines: lost, failing, throttled, full, fragmented (V15, M1).

The three fault classes of V15 have an order: GPU memory first, CPU second, network third; `alerts.routing` lets the
first one silence the others on the same machine. CPU and network come from node_exporter and blackbox_exporter where
they run, for machines that have a GPU; their targets must be named as the nodes are.
"""

from __future__ import annotations

from typing import Final

from alerts.model import Alert, Group, Scope, Severity, grown, matching
from exporters.boards import Board

_GPU: Final = ("node", "gpu", "uuid")
_BY: Final = ", ".join(_GPU)
_NODE: Final = {"node": "node"}
_NAME: Final = "GPU {{ $labels.gpu }} ({{ $labels.uuid }}) of {{ $labels.node }}"
#: As a capture names GPUs.
_VICTIM: Final = "{{ $labels.node }}/gpu-{{ $labels.gpu }}"

#: XIDs that tell of the GPU, its memory, its links or its firmware (NVIDIA's XID catalogue); 79 is a lost GPU.
HARDWARE_XIDS: Final = (
    *("46", "48", "62", "63", "64", "74", "79", "92", "94", "95", "110", "119", "120", "121"),
    *("136", "140", "143", "155", "156"),
)
#: XIDs that a faulty program raises as well: exception, page fault, stopped channel, cleanup.
PROGRAM_XIDS: Final = ("13", "31", "43", "45", "68", "69")
#: Clocks held down by something that somebody has to repair. A power cap alone is the normal state of a busy GPU.
THROTTLES: Final = (
    "hw_slowdown",
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "reliability",
)


def gpus(scope: Scope) -> Group:
    """Return the alerts on single GPUs and on the machines that hold them."""
    used, total = scope("gpu_memory_used_bytes"), scope("gpu_memory_total_bytes")
    reserved = scope("gpu_memory_reserved_bytes")
    filled = f"(max by ({_BY}) ({used}) + max by ({_BY}) ({reserved}) or max by ({_BY}) ({used}))"
    up = scope("gpu_up")
    has_gpu = f"on (node) max by (node) ({up})"
    throttled = scope("gpu_throttled", matching("reason", *THROTTLES))
    idle = f"avg by (instance) (rate({scope('node_cpu_seconds_total', window='1m', mode='idle')}))"
    jitter = f"min_over_time({scope('probe_icmp_duration_seconds', window='1m', phase='rtt')})"
    return Group(
        "prioscope-gpus",
        (
            Alert(
                "PrioscopeGpuLost",
                f"max by ({_BY}, reason) ({up}) == 0",
                Severity.CRITICAL,
                (*_GPU, "reason"),
                "A GPU does not answer",
                f"{_NAME} does not answer: {{{{ $labels.reason }}}}.",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                hold="1m",
                capture=True,
                victim=_VICTIM,
            ),
            Alert(
                "PrioscopeGpuMissing",
                f"max by ({_BY}, job, instance) ({up} offset 1h) unless on (node, uuid) {up}"
                f" and on (job, instance) {scope('prioscope_source_up')} == 1",
                Severity.WARNING,
                (*_GPU, "job", "instance"),
                "A GPU that was there an hour ago is not listed any more",
                f"{_NAME} was there an hour ago; the driver answers and does not list it.",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                hold="10m",
            ),
            Alert(
                "PrioscopeGpuHardwareXid",
                f"sum by ({_BY}, xid) ("
                + grown(
                    scope,
                    "gpu_xid_errors_total",
                    "15m",
                    "prioscope_snapshot_age_seconds",
                    matching("xid", *HARDWARE_XIDS),
                )
                + ") > 0",
                Severity.WARNING,
                (*_GPU, "xid"),
                "The driver reported a hardware error of a GPU",
                f"{_NAME} had XID {{{{ $labels.xid }}}} (count in 15 minutes: {{{{ $value | humanize }}}}).",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                capture=True,
                victim=_VICTIM,
            ),
            Alert(
                "PrioscopeGpuProgramXid",
                f"sum by ({_BY}, xid) ("
                + grown(
                    scope,
                    "gpu_xid_errors_total",
                    "15m",
                    "prioscope_snapshot_age_seconds",
                    matching("xid", *PROGRAM_XIDS),
                )
                + ") > 0",
                Severity.INFO,
                (*_GPU, "xid"),
                "The driver stopped a program on a GPU",
                f"{_NAME} had XID {{{{ $labels.xid }}}} (count in 15 minutes: {{{{ $value | humanize }}}}).",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
            ),
            Alert(
                "PrioscopeGpuUncorrectedEcc",
                f"sum by ({_BY}) (increase({scope('gpu_ecc_errors_total', window='1h', kind='uncorrected')})) > 0",
                Severity.WARNING,
                _GPU,
                "A GPU's memory had an error that could not be corrected",
                f'{_NAME} had {{{{ $value | printf "%.0f" }}}} uncorrected ECC errors in an hour.',
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                capture=True,
                victim=_VICTIM,
            ),
            Alert(
                "PrioscopeGpuCorrectedEccHigh",
                f"sum by ({_BY}) (increase({scope('gpu_ecc_errors_total', window='1h', kind='corrected')})) > 100",
                Severity.INFO,
                _GPU,
                "A GPU's memory had many errors that were corrected",
                f'{_NAME} had {{{{ $value | printf "%.0f" }}}} corrected ECC errors in an hour.',
                Board.FRAGMENTATION,
                _NODE,
                "V15",
            ),
            Alert(
                "PrioscopeGpuThrottled",
                f"max by ({_BY}, reason) ({throttled}) == 1",
                Severity.WARNING,
                (*_GPU, "reason"),
                "Heat or power supply holds down the clocks of a GPU",
                f"{_NAME} is slowed down: {{{{ $labels.reason }}}}.",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                hold="5m",
                capture=True,
                victim=_VICTIM,
            ),
            Alert(
                "PrioscopeGpuMemoryFragmented",
                f"max by ({_BY}, scope) ({scope('gpu_fragmentation_index')}) > 0.68"
                f" and on ({_BY}, scope) max by ({_BY}, scope) ({scope('gpu_fragmentation_ratio')}) > 0.5",
                Severity.INFO,
                (*_GPU, "scope"),
                "The free memory of a GPU is in small pieces",
                f'The fragmentation index of {_NAME} ({{{{ $labels.scope }}}}) is {{{{ $value | printf "%.2f" }}}}.',
                Board.FRAGMENTATION,
                _NODE,
                "M1",
                hold="15m",
            ),
            Alert(
                "PrioscopeGpuMemoryExhausted",
                f"{filled} / max by ({_BY}) ({total}) > 0.98",
                Severity.WARNING,
                _GPU,
                "The memory of a GPU is full: the next allocation fails",
                f"{{{{ $value | humanizePercentage }}}} of the memory of {_NAME} is in use.",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                hold="1m",
                capture=True,
                victim=_VICTIM,
            ),
            Alert(
                "PrioscopeGpuHostCpuSaturated",
                f"max by (node) ({_node(f'1 - {idle}')}) > 0.95 and {has_gpu}",
                Severity.WARNING,
                ("node",),
                "The CPUs of a machine with GPUs are saturated",
                "The CPUs of {{ $labels.node }} are {{ $value | humanizePercentage }} busy.",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                hold="1m",
            ),
            Alert(
                "PrioscopeGpuHostNetworkJitter",
                f"max by (node) ({_node(jitter)}) > 0.2 and {has_gpu}",
                Severity.WARNING,
                ("node",),
                "A machine with GPUs answers slowly over the network",
                "The round trip to {{ $labels.node }} took at least {{ $value | humanizeDuration }} for a minute.",
                Board.FRAGMENTATION,
                _NODE,
                "V15",
                hold="1m",
            ),
            Alert(
                "PrioscopeGpuNodeDown",
                f"max by (cluster, node) ({scope('gpu_node_up', state='down')}) == 0",
                Severity.WARNING,
                ("cluster", "node"),
                "The scheduler has lost a machine",
                "The scheduler of {{ $labels.cluster }} says that {{ $labels.node }} is down.",
                Board.SCHEDULER,
                {"cluster": "cluster"},
                "V1",
                hold="5m",
            ),
        ),
    )


def _node(expr: str) -> str:
    """Give ``expr`` the label ``node``: its ``instance`` without the port."""
    return f'label_replace({expr}, "node", "$1", "instance", "([^:]+)(?::[0-9]+)?")'
