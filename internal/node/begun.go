package node

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/datadir"
	"fleetd/internal/durable"
	"fleetd/internal/store/database"
	"fleetd/internal/store/jobstore"
)

// noteEvery is how often a node notes how many commits have begun tasks. After a kill it knows a little less, never more.
const noteEvery = time.Second

// restored is that the database was restored, until the jobs have been halted for it.
type restored struct {
	mu      sync.Mutex
	is      bool
	planned bool
}

func (r *restored) set(lineage string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.is, r.planned = true, database.IsPlannedMove(lineage)
}

// take reports the restore once.
func (r *restored) take() (planned, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	planned, ok = r.planned, r.is
	r.is = false
	return planned, ok
}

// readBegun reads the note of an earlier start. Without one, or with one that cannot be read, nothing is known.
func (n *node) readBegun() (h jobstore.History) {
	text, err := os.ReadFile(n.dir.File(datadir.FileBegun))
	if err != nil {
		return h
	}
	if _, err := fmt.Sscanf(string(text), "%s %d\n", &h.Lineage, &h.Begun); err != nil {
		return jobstore.History{}
	}
	return h
}

// noteBegun keeps the note until ctx ends. It is not synced: after a power cut it may be older, or gone.
func (s *jobsSide) noteBegun(ctx context.Context) {
	var noted jobstore.History
	failed := false
	write := func() {
		h := s.store.History()
		if h == noted || h.Lineage == "" {
			return
		}
		err := durable.Note(s.node.dir.File(datadir.FileBegun), fmt.Appendf(nil, "%s %d\n", h.Lineage, h.Begun))
		if err == nil {
			noted = h
		} else if !failed {
			s.node.log.Warn("the note of begun tasks cannot be written: after a restore of the database by its own tools this node will not know that tasks ran", "error", err)
		}
		failed = err != nil
	}
	for range clock.Ticks(ctx, noteEvery) {
		write()
	}
	write()
}
