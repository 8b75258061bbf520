"""The model's part of one evaluation: from this rank's rows to its energies and forces."""

from __future__ import annotations

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
from nvdd_md.domain.decomposition import Domain
from nvdd_md.domain.exchange import TokenChain
from nvdd_md.domain.lattice import FloatArray
from nvdd_md.phase_times import PhaseTimes
from nvdd_md.policies import HaloPolicy
from nvdd_md.potential import LocalGraph, OutputKind, Potential
from nvdd_md.system import Surroundings

VOIGT = ((0, 1, 2, 1, 0, 0), (0, 1, 2, 2, 2, 1))
"""Rows and columns of xx, yy, zz, yz, xz, xy."""


def voigt(matrix: FloatArray) -> FloatArray:
    """Return xx, yy, zz, yz, xz, xy (6,) of the symmetric part of ``matrix`` (3, 3)."""
    return np.asarray((0.5 * (matrix + matrix.T))[VOIGT])


class NonFiniteError(ArithmeticError):
    """The model returned energies or forces that are not finite; the same error on all ranks."""


@dataclass(frozen=True)
class LocalRows:
    """The atoms that a rank's model sees, as tensors on its device.

    Attributes
    ----------
    numbers : (n_rows,) int64
        Local rows: own, then ghosts; a dummy row has the potential's dummy element.
    positions : (n_rows, 3) float64, Å
    arrays : mapping of str to (n_own_rows, ...) tensor
        The declared keys of ``atoms.arrays``.
    """

    numbers: Tensor
    positions: Tensor
    arrays: Mapping[str, Tensor]


@dataclass(frozen=True)
class LocalResults:
    """One rank's part of an evaluation.

    Attributes
    ----------
    outputs : mapping of str to Tensor
        Detached outputs of the forward, by declared name.
    forces : (n_own_rows, 3) float64, eV/Å
        Complete: contributions of other ranks' edges folded in.
    virial : (3, 3) float64, eV
        ``sum r ⊗ dE/dr`` over this rank's edges; a partial sum.
    """

    outputs: Mapping[str, Tensor]
    forces: Tensor
    virial: Tensor


@dataclass(frozen=True)
class EdgeGradients:
    """What an evaluation leaves behind for per-atom stresses.

    Attributes
    ----------
    vectors, gradients : (n_edges, 3) float64, Å and eV/Å
    centre, neighbour : (n_edges,) int64
        Local rows.
    domain : Domain
        The one that the rows belong to.
    """

    vectors: Tensor
    gradients: Tensor
    centre: Tensor
    neighbour: Tensor
    domain: Domain


class Evaluator:
    """Runs one potential on this rank's rows, forward and backward.

    Parameters
    ----------
    potential : Potential
    comm : Communicator
    times : PhaseTimes
        Gets the seconds of ``graph``, ``forward``, ``backward`` and ``fold``.
    force_halo : bool
        Take the distributed path on a single rank too (for tests and measurements).
    """

    def __init__(
        self,
        potential: Potential,
        comm: Communicator,
        times: PhaseTimes,
        *,
        force_halo: bool = False,
    ) -> None:
        self.potential = potential
        self.comm = comm
        self.times = times
        self.force_halo = force_halo
        self.n_evaluations = 0
        self._edges: EdgeGradients | None = None

    def evaluate(self, rows: LocalRows, around: Surroundings, domain: Domain) -> LocalResults:
        """Return this rank's part of the results. Collective."""
        # The caller may be inside torch.no_grad() or torch.inference_mode().
        with torch.inference_mode(False), torch.enable_grad():
            with self.times.measure("graph"):
                graph, vectors = self._local_graph(rows, around, domain)
            results = self._run(graph, vectors, domain)
        self.n_evaluations += 1
        return results

    def per_atom_virials(self) -> tuple[Tensor, Domain]:
        """Return virials (n_own_rows, 6) in eV of the last evaluation, and its domain. Collective.

        Half of each edge's virial goes to its centre, half to its neighbour.

        Raises
        ------
        RuntimeError
            If nothing was evaluated.
        """
        edges = self._edges
        if edges is None:
            raise RuntimeError("no evaluation to take stresses from")
        outer = edges.vectors[:, :, None] * edges.gradients[:, None, :]
        virials = (0.25 * (outer + outer.transpose(1, 2)))[:, VOIGT[0], VOIGT[1]]
        local = virials.new_zeros((edges.domain.routing.n_rows, 6))
        _add_rows(local, edges.centre, virials)
        _add_rows(local, edges.neighbour, virials)
        return _collect_ghosts(local, edges.domain), edges.domain

    def _local_graph(
        self, rows: LocalRows, around: Surroundings, domain: Domain
    ) -> tuple[LocalGraph, Tensor]:
        """Return the local graph and its edge vectors (n_edges, 3) in float64."""
        potential, routing = self.potential, domain.routing
        device = potential.device
        cell = torch.from_numpy(around.lattice.vectors).to(device)
        centre, neighbour = domain.edge_centre, domain.edge_neighbour
        vectors = rows.positions.index_select(0, neighbour)
        vectors -= rows.positions.index_select(0, centre)
        vectors += domain.edge_shift @ cell
        near = torch.nonzero(torch.linalg.vector_norm(vectors, dim=1) < potential.cutoff)[:, 0]
        vectors = vectors.index_select(0, near)
        n_own = routing.n_own_rows
        graph = LocalGraph(
            numbers=rows.numbers[:n_own],
            neighbour_numbers=rows.numbers,
            edge_centre=centre.index_select(0, near),
            edge_neighbour=neighbour.index_select(0, near),
            edge_vectors=vectors.detach().to(potential.dtype, copy=True).requires_grad_(),
            n_owned=routing.n_owned,
            system=torch.zeros(n_own, dtype=torch.int64, device=device),
            n_systems=1,
            info={
                key: torch.full((1,), value, dtype=potential.dtype, device=device)
                for key, value in around.info.items()
            },
            arrays=rows.arrays,
            cell=torch.from_numpy(around.cell).to(device),
            pbc=torch.from_numpy(around.pbc).to(device),
        )
        return graph, vectors

    def _run(self, graph: LocalGraph, vectors: Tensor, domain: Domain) -> LocalResults:
        """Run the model forward and backward on this rank's rows. Collective."""
        distributed = self.comm.size > 1 or self.force_halo
        forward_context = context.DDContext(
            comm=self.comm,
            policy=HaloPolicy() if distributed else None,
            routing=domain.routing,
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
            forces = vectors.new_zeros((domain.routing.n_rows, 3))
            _add_rows(forces, graph.edge_centre, gradients)
            _add_rows(forces, graph.edge_neighbour, -gradients)
            own_forces = _collect_ghosts(forces, domain)
        self._edges = EdgeGradients(
            vectors, gradients, graph.edge_centre, graph.edge_neighbour, domain
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
    def nobody_left_waiting(self, load: object) -> Iterator[None]:
        """Take the job down if this rank fails where the others wait for it.

        Parameters
        ----------
        load : object
            What this rank holds; shown with the failure.
        """
        try:
            yield
        except NonFiniteError:
            raise  # by all ranks, after the last exchange
        except BaseException as error:
            if _is_out_of_memory(error):
                error.add_note(f"{load}. {_MEMORY_ADVICE}")
            if self.comm.size == 1:
                raise
            print(
                f"nvdd_md: {self._who()} failed during an evaluation ({load}); "
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


def _collect_ghosts(local: Tensor, domain: Domain) -> Tensor:
    """Return own rows with the ghost rows of all ranks added. Collective."""
    routing = domain.routing
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
