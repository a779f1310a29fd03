from trainer_cli.parallel.agreement import Agreement as Agreement
from trainer_cli.parallel.distributed_group import (
    find_default_group as find_default_group,
    join_processes as join_processes,
)
from trainer_cli.parallel.peer_errors import (
    LostRankError as LostRankError,
    PeerError as PeerError,
    is_of_peer as is_of_peer,
    noted_activity as noted_activity,
    noting as noting,
)
from trainer_cli.parallel.process_group import (
    ALONE as ALONE,
    ProcessGroup as ProcessGroup,
    describe_lone_rank as describe_lone_rank,
    find_default_ranks as find_default_ranks,
    imitate_group as imitate_group,
)
from trainer_cli.parallel.rendezvous import serve_store as serve_store
from trainer_cli.parallel.same import (
    check_same as check_same,
    check_same_file as check_same_file,
    check_same_losses as check_same_losses,
    check_same_samples as check_same_samples,
)
