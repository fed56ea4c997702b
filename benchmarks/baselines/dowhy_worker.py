"""Run one dowhy.gcm attribution: a request as JSON on stdin, the scores as the last line of stdout.

Stands alone, so that it can run under another interpreter than the benchmark's.
"""

from __future__ import annotations

import json
import sys
import warnings


def main() -> None:
    """Fit linear additive-noise models on normal data and attribute the target's anomaly to the nodes' noises."""
    request = json.load(sys.stdin)
    warnings.filterwarnings("ignore")
    import networkx as nx
    import numpy as np
    import pandas as pd
    from dowhy import gcm

    gcm.config.disable_progress_bars()
    gcm.util.general.set_random_seed(0)
    size = len(request["baseline"])
    graph = nx.DiGraph()
    graph.add_nodes_from(range(size))
    graph.add_edges_from(tuple(edge) for edge in request["edges"])
    model = gcm.InvertibleStructuralCausalModel(graph)
    for node in range(size):
        if graph.in_degree(node):
            model.set_causal_mechanism(node, gcm.AdditiveNoiseModel(gcm.ml.create_linear_regressor()))
        else:
            model.set_causal_mechanism(node, gcm.EmpiricalDistribution())
    gcm.fit(model, pd.DataFrame(np.array(request["baseline"]).T, columns=range(size)))
    shares = gcm.attribute_anomalies(
        model, request["target"], pd.DataFrame(np.array(request["window"]).T, columns=range(size))
    )
    scores = [float(np.mean(shares[node])) if node in shares else float("nan") for node in range(size)]
    sys.stdout.write("\n" + json.dumps(scores) + "\n")


if __name__ == "__main__":
    main()
