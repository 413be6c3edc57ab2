package node

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/durable"
)

const (
	auditGrace = 10 * time.Second // for the last entries
	awayGrace  = time.Second      // the same while the database is away
	// maxUnwritten bounds the file of entries that no database took, over any
	// number of starts.
	maxUnwritten = 256 << 20
)

// startAudit opens the record of who did what. It ends behind all that makes
// entries, and before the database.
func (n *node) startAudit() {
	n.audit = audit.New(audit.Options{Node: n.cfg.Node, Version: n.cfg.Version, Store: n.store, Log: n.log, Spill: n.dir.spillAudit})
	n.onStop(func() {
		grace := auditGrace
		if n.store.Ready() != nil {
			grace = awayGrace
		}
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		if err := n.audit.Close(ctx); err != nil {
			n.log.Error("the audit has a gap", "error", err)
		}
	})
	n.whileRunning(n.recoverAudit)
}

// spillAudit keeps blocks that the database did not take before the node
// stopped.
func (d *dataDir) spillAudit(blocks []audit.Block) error {
	var content []byte
	for i := range blocks {
		content = audit.AppendExport(content, &blocks[i])
	}
	return durable.Append(d.file(fileAudit), maxUnwritten, content)
}

// recoverAudit writes what an earlier run could not.
func (n *node) recoverAudit(ctx context.Context) {
	name := n.dir.file(fileAudit)
	content, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	for err == nil {
		if err = n.store.WaitReady(ctx); err != nil {
			break
		}
		blocks := 0
		err = audit.ReadExport(bytes.NewReader(content), func(b *audit.Block) error {
			blocks++
			return n.store.SaveAuditBlock(ctx, b)
		})
		if err == nil {
			if err = os.Remove(name); err == nil {
				n.log.Info("the audit of an earlier run is written", "blocks", blocks)
				return
			}
			break
		}
		if n.store.Ready() == nil && ctx.Err() == nil {
			break // the file is to blame
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
			err = nil
		}
	}
	if ctx.Err() == nil {
		n.log.Error("the audit of an earlier run cannot be written; the file stays", "file", name, "error", err)
	}
}
