package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"fleetd/internal/audit"
	"fleetd/internal/config"
	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/durable"
)

const (
	auditGrace   = 10 * time.Second // for the last entries
	offlineGrace = time.Second      // the same while the database is unreachable
	// maxUnwritten is the size limit of the file of entries that could not be written to
	// the database, over any number of starts.
	maxUnwritten = 256 << 20
)

// startAudit opens the audit log. It stops after all parts that write entries, and before
// the database.
func (n *node) startAudit() {
	n.audit = audit.New(audit.Options{Node: n.cfg.Node, Version: n.cfg.Version, Key: n.mint.AuditKey(),
		Store: n.store, Log: n.log, Spill: func(blocks []audit.Block) error { return spillAudit(n.dir, blocks) }})
	n.onStop(func() {
		grace := auditGrace
		if n.store.Ready() != nil {
			grace = offlineGrace
		}
		ctx, cancel := context.WithTimeout(context.Background(), grace)
		defer cancel()
		if err := n.audit.Close(ctx); err != nil {
			n.log.Error("audit entries were lost", "error", err)
		}
	})
	n.whileRunning(n.recoverAudit)
}

// AuditKey returns the key with which a node with these settings hashes its audit log; nil
// if its secret is not available.
func AuditKey(cfg *config.Config) ([]byte, error) {
	secret := cfg.Secret
	if secret == "" {
		content, err := os.ReadFile(filepath.Join(cfg.DataDir, datadir.FileSecret))
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("read secret: %w", err)
		}
		secret = strings.TrimSpace(string(content))
	}
	mint, err := credential.New([]byte(secret))
	if err != nil {
		return nil, fmt.Errorf("--secret: %w", err)
	}
	return mint.AuditKey(), nil
}

// spillAudit stores blocks that could not be written to the database before the node
// stopped.
func spillAudit(d *datadir.Dir, blocks []audit.Block) error {
	var content []byte
	for i := range blocks {
		content = audit.AppendExport(content, &blocks[i])
	}
	return durable.Append(d.File(datadir.FileAudit), maxUnwritten, content)
}

// recoverAudit writes the blocks of earlier runs.
func (n *node) recoverAudit(ctx context.Context) {
	name := n.dir.File(datadir.FileAudit)
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
				n.log.Info("audit entries of an earlier run were written", "blocks", blocks)
				return
			}
			break
		}
		if n.store.Ready() == nil && ctx.Err() == nil {
			break // the file is the cause
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
			err = nil
		}
	}
	if ctx.Err() == nil {
		n.log.Error("cannot write the audit entries of an earlier run; the file is kept", "file", name, "error", err)
	}
}
