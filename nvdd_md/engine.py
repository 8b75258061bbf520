"""One energy, force and stress evaluation, from positions to results."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvdd_md import adapters, context
from nvdd_md.comm import Communicator, job_rank
from nvdd_md.domain.decomposition import Decomposition, decompose
from nvdd_md.domain.exchange import TokenChain
from nvdd_md.domain.lattice import FloatArray
from nvdd_md.phase_times import PhaseTimes
from nvdd_md.policies import HaloPolicy
from nvdd_md.potential import LocalGraph, OutputKind, Potential
from nvdd_md.results import VOIGT, LocalResults, NonFiniteError, Results, consolidate
from nvdd_md.shard import ShardTensor
from nvdd_md.system import System

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeGradients:
    """What an evaluation leaves behind for per-atom stresses.

    Attributes
    ----------
    vectors, gradients : (n_edges, 3) float64, Å and eV/Å
    centre, neighbour : (n_edges,) int64
        Local rows.
    decomposition : Decomposition
        The one that the rows belong to.
    """

    vectors: Tensor
    gradients: Tensor
    centre: Tensor
    neighbour: Tensor
    decomposition: Decomposition


class ForceEngine:
    """Evaluates one potential over the ranks of one communicator.

    Keeps the decomposition, its edges and its routing as long as no pair can be missed, and
    rebuilds them on all ranks together when one may be.

    Parameters
    ----------
    potential : Potential
    comm : Communicator
    skin : float, Å
        Edges up to ``cutoff + skin`` are listed, so that a list outlives small displacements.
    cut_axes : tuple of int
        Cell axes that may be cut.
    force_halo : bool
        Take the distributed path on a single rank too (for tests and measurements).
    """

    def __init__(
        self,
        potential: Potential,
        comm: Communicator,
        *,
        skin: float,
        cut_axes: tuple[int, ...] = (0, 1, 2),
        force_halo: bool = False,
    ) -> None:
        self.potential = potential
        self.comm = comm
        self.skin = skin
        self.cut_axes = cut_axes
        self.force_halo = force_halo
        self.decomposition: Decomposition | None = None
        self.times = PhaseTimes(comm.traffic)
        self.n_evaluations = 0
        self.n_rebuilds = 0
        self._numbers = np.zeros(0, dtype=np.int64)
        self._edge_gradients: EdgeGradients | None = None
        self._volume: float | None = None

    @property
    def list_cutoff(self) -> float:
        """Length up to which edges are listed, Å."""
        return self.potential.cutoff + self.skin

    def decomposition_for(self, system: System) -> Decomposition:
        """Return a decomposition that covers ``system``, rebuilt where necessary. Collective."""
        with self._nobody_left_waiting():
            return self._covering(system)

    def _covering(self, system: System) -> Decomposition:
        current = self.decomposition
        with self.times.measure("neighbours"):
            if current is not None and not np.array_equal(system.numbers, self._numbers):
                current = None
            if current is not None and current.covers(system.positions, system.lattice):
                return current
        self.decomposition = decompose(
            system.positions,
            system.lattice,
            self.comm,
            cutoff=self.potential.cutoff,
            skin=self.skin,
            weights=None if current is None else current.weights,
            cut_axes=self.cut_axes,
            device=self.potential.device,
            times=self.times,
        )
        self._numbers = system.numbers
        self.n_rebuilds += 1
        _log.debug("list %d, rank %d: %s", self.n_rebuilds, self.comm.rank, self._load())
        return self.decomposition

    def evaluate(self, system: System) -> Results:
        """Return the results of ``system``, the same bits on every rank. Collective.

        All ranks must have agreed on ``system``. A failure on one rank of several between here
        and the last exchange takes the job down, because the others wait for this rank.

        Raises
        ------
        NonFiniteError
            On all ranks, if the model's energies or forces are not finite.
        """
        if not len(system):
            return _nothing(self.potential, system)
        with self._nobody_left_waiting():
            decomposition = self._covering(system)
            # The caller may be inside torch.no_grad() or torch.inference_mode().
            with torch.inference_mode(False), torch.enable_grad():
                with self.times.measure("graph"):
                    graph, vectors = self._local_graph(system, decomposition)
                local = self._evaluate_local(graph, vectors, decomposition)
            self.n_evaluations += 1
            self._volume = system.volume
            with self.times.measure("gather"):
                return consolidate(local, self.potential, system, decomposition, self.comm)

    def per_atom_stresses(self) -> FloatArray:
        """Return the stresses (n_atoms, 6) eV/Å³ of the last evaluation. Collective.

        Half of each edge's virial goes to its centre, half to its neighbour, divided by the total
        volume: the rows add up to the stress. (This is not the heat-flux virial of many-body
        models.)
        """
        edges, volume = self._edge_gradients, self._volume
        if edges is None or volume is None:
            raise RuntimeError("no evaluation with a volume to take stresses from")
        decomposition = edges.decomposition
        with self._nobody_left_waiting():
            outer = edges.vectors[:, :, None] * edges.gradients[:, None, :]
            virials = (0.25 * (outer + outer.transpose(1, 2)))[:, VOIGT[0], VOIGT[1]]
            local = virials.new_zeros((decomposition.routing.n_rows, 6))
            _add_rows(local, edges.centre, virials)
            _add_rows(local, edges.neighbour, virials)
            own = _collect_ghosts(local, decomposition)
            stresses = ShardTensor(own, decomposition).full_tensor() / volume
        return np.asarray(stresses.cpu().numpy())

    def _local_graph(
        self, system: System, decomposition: Decomposition
    ) -> tuple[LocalGraph, Tensor]:
        """Return the local graph and its edge vectors (n_edges, 3) in float64."""
        potential, routing = self.potential, decomposition.routing
        device = potential.device
        ids = decomposition.local_ids
        if not routing.n_owned:
            ids = np.concatenate((np.zeros(1, dtype=np.int64), ids))
        positions = torch.from_numpy(system.positions[ids]).to(device)
        cell = torch.from_numpy(system.lattice.vectors).to(device)
        numbers = system.numbers[ids]
        if not routing.n_owned:
            numbers[0] = potential.dummy_element

        centre, neighbour = decomposition.edge_centre, decomposition.edge_neighbour
        vectors = positions.index_select(0, neighbour) - positions.index_select(0, centre)
        vectors += decomposition.edge_shift @ cell
        near = torch.nonzero(torch.linalg.vector_norm(vectors, dim=1) < potential.cutoff)[:, 0]
        vectors = vectors.index_select(0, near)
        n_own = routing.n_own_rows
        graph = LocalGraph(
            numbers=torch.from_numpy(numbers[:n_own]).to(device),
            neighbour_numbers=torch.from_numpy(numbers).to(device),
            edge_centre=centre.index_select(0, near),
            edge_neighbour=neighbour.index_select(0, near),
            edge_vectors=vectors.detach().to(potential.dtype, copy=True).requires_grad_(),
            n_owned=routing.n_owned,
            system=torch.zeros(n_own, dtype=torch.int64, device=device),
            n_systems=1,
            info={
                key: torch.full((1,), value, dtype=potential.dtype, device=device)
                for key, value in system.info.items()
            },
            arrays={
                key: torch.from_numpy(array[ids[:n_own]]).to(device)
                for key, array in system.arrays.items()
            },
            cell=torch.from_numpy(system.cell).to(device),
            pbc=torch.from_numpy(system.pbc).to(device),
        )
        return graph, vectors

    def _evaluate_local(
        self, graph: LocalGraph, vectors: Tensor, decomposition: Decomposition
    ) -> LocalResults:
        """Run the model forward and backward on this rank's rows. Collective."""
        distributed = self.comm.size > 1 or self.force_halo
        forward_context = context.DDContext(
            comm=self.comm,
            policy=HaloPolicy() if distributed else None,
            routing=decomposition.routing,
            n_owned=graph.n_owned,
            n_systems=graph.n_systems,
            chain=TokenChain(graph.edge_vectors),
        )
        replaced = self.potential.adapters() if distributed else ()
        with adapters.installed(replaced), context.active(forward_context):
            with self.times.measure("forward"):
                outputs = self.potential.forward(graph)
                _check_outputs(outputs, graph, self.potential)
            with self.times.measure("backward"):
                gradients = self._edge_gradient(outputs, graph, forward_context.chain)
        with self.times.measure("fold"):
            forces = vectors.new_zeros((decomposition.routing.n_rows, 3))
            _add_rows(forces, graph.edge_centre, gradients)
            _add_rows(forces, graph.edge_neighbour, -gradients)
            own_forces = _collect_ghosts(forces, decomposition)
        self._edge_gradients = EdgeGradients(
            vectors, gradients, graph.edge_centre, graph.edge_neighbour, decomposition
        )
        detached = {name: outputs[name].detach() for name in self.potential.outputs}
        return LocalResults(detached, own_forces, vectors.T @ gradients)

    def _edge_gradient(
        self, outputs: Mapping[str, Tensor], graph: LocalGraph, chain: TokenChain
    ) -> Tensor:
        """Return dE/d(edge vector), (n_edges, 3) float64, in one backward. Collective.

        Partial outputs are seeded with 1 on every rank, replicated ones with 1 on rank 0 only.
        The last token is differentiated too: see Note [Token chain] in ``domain/exchange.py``.
        """
        targets, seeds = [chain.token], [torch.zeros_like(chain.token)]
        for name in self.potential.energy_terms:
            target = outputs[name]
            if not target.requires_grad:
                continue
            seed = torch.ones_like(target)
            kind = self.potential.outputs[name]
            if kind is OutputKind.PER_NODE:
                seed[graph.n_owned :] = 0.0
            elif kind is not OutputKind.SYSTEM_PARTIAL and self.comm.rank != 0:
                seed.zero_()
            targets.append(target)
            seeds.append(seed)
        if len(targets) == 1 and len(graph.edge_vectors):
            raise ValueError(
                f"no energy of {self.potential.name} depends on graph.edge_vectors, so there are "
                "no forces to be had: did its forward leave autograd (detach, numpy, no_grad)?"
            )
        (gradient,) = torch.autograd.grad(
            targets, [graph.edge_vectors], seeds, allow_unused=True, materialize_grads=True
        )
        return gradient.to(torch.float64)

    @contextmanager
    def _nobody_left_waiting(self) -> Iterator[None]:
        """Take the job down if this rank fails where the others wait for it."""
        try:
            yield
        except NonFiniteError:
            raise  # by all ranks, after the last exchange
        except BaseException as error:
            if _is_out_of_memory(error):
                error.add_note(f"{self._load()}. {_MEMORY_ADVICE}")
            if self.comm.size == 1:
                raise
            print(
                f"nvdd_md: {self._who()} failed during an evaluation ({self._load()}); "
                "the other ranks wait for it, so the whole job is aborted.\n"
                f"{traceback.format_exc()}",
                file=sys.stderr,
                flush=True,
            )
            self.comm.abort(1)

    def _who(self) -> str:
        comm = self.comm
        part = f" (rank {job_rank()} of the job)" if comm.size < comm.job_size else ""
        return f"rank {comm.rank} of {comm.size}{part}"

    def _load(self) -> str:
        current = self.decomposition
        if current is None:
            return "before the first decomposition"
        return (
            f"owned {len(current.owned)}, ghosts {len(current.ghosts)}, "
            f"edges {len(current.edge_centre)}"
        )


_MEMORY_ADVICE = (
    "The memory of a rank goes with its edges and atoms: start more ranks, choose float32 where "
    "the model allows it, or a smaller skin"
)


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed. On a CPU torch raises a plain RuntimeError for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )


def _add_rows(target: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add ``rows`` (n, k) to ``target`` (m, k) at ``index`` (n,), in order.

    ``scatter_add_``, because ``index_add_`` takes five times as long for three columns on a CPU.
    """
    target.scatter_add_(0, index[:, None].expand_as(rows), rows)


def _collect_ghosts(local: Tensor, decomposition: Decomposition) -> Tensor:
    """Return own rows with the ghost rows of all ranks added. Collective."""
    routing = decomposition.routing
    return routing.collect(local[: routing.n_own_rows], local[routing.n_own_rows :])


def _check_outputs(outputs: Mapping[str, Tensor], graph: LocalGraph, potential: Potential) -> None:
    missing = [name for name in potential.outputs if name not in outputs]
    if missing:
        raise ValueError(
            f"{potential.name} declares {missing} but its forward returned {list(outputs)}"
        )
    undeclared = sorted(set(outputs) - set(potential.outputs))
    if undeclared:
        raise ValueError(f"{potential.name} returned outputs it does not declare: {undeclared}")
    for name, kind in potential.outputs.items():
        rows = len(outputs[name]) if outputs[name].dim() else 0
        expected = {
            OutputKind.PER_NODE: graph.n_centre_rows,
            OutputKind.SYSTEM_PARTIAL: graph.n_systems,
            OutputKind.SYSTEM_TOTAL: graph.n_systems,
        }.get(kind, rows)
        if rows != expected:
            raise ValueError(
                f"output {name!r} of {potential.name} is declared {kind.value!r} and must have "
                f"{expected} rows, got shape {tuple(outputs[name].shape)}"
            )


def _nothing(potential: Potential, system: System) -> Results:
    """Return the results of a system without atoms."""
    results: Results = {"energy": 0.0, "free_energy": 0.0, "forces": np.zeros((0, 3))}
    if "energies" in potential.outputs:
        results["energies"] = np.zeros(0)
    if system.volume is not None:
        results["stress"] = np.zeros(6)
    return results
