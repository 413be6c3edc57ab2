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
func (n *node) startAudit(ctx context.Context) {
	n.auditSince = n.keyedSince(ctx)
	n.audit = audit.New(audit.Options{Node: n.cfg.Node, Version: n.cfg.Version, Key: n.mint.AuditKey(), Since: n.auditSince,
		Store: n.store, Log: n.log, Spill: n.dir.spillAudit})
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

// keyedSince is when the fleet began to hash its record under its key: the
// earliest that this directory and the database know. Both are sealed, so that
// neither can be set to another time; who takes the database's out does not get
// at the directory's, nor at those of other nodes.
func (n *node) keyedSince(ctx context.Context) time.Time {
	const purpose = "audit since"
	since := n.started.Truncate(time.Second)
	earlier := func(where, sealed string) {
		var at time.Time
		text, err := n.mint.Settings().Open(purpose, "", strings.TrimSpace(sealed))
		if err == nil {
			err = at.UnmarshalText(text)
		}
		switch {
		case err != nil:
			n.log.Error("when the fleet began to key its audit was changed by somebody", "where", where, "error", err)
		case at.Before(since):
			since = at
		}
	}
	seal := func() string {
		text, _ := since.MarshalText() // a time of this century
		return n.mint.Settings().Seal(purpose, "", text)
	}
	noted, err := os.ReadFile(n.dir.file(fileKeyed))
	if err == nil {
		earlier(fileKeyed, string(noted))
	}
	before := since
	if stored, err := n.store.AuditKeyed(ctx, seal()); err == nil {
		earlier("database", stored)
	}
	if err != nil || since.Before(before) {
		if err := n.dir.write(fileKeyed, []byte(seal()+"\n")); err != nil {
			n.log.Warn("not noted since when the audit is keyed", "error", err)
		}
	}
	return since
}

// AuditKey is the key under which a node with these settings hashes its audit;
// nil if its secret is not here.
func AuditKey(cfg *config.Config) ([]byte, error) {
	secret := cfg.Secret
	if secret == "" {
		content, err := os.ReadFile(filepath.Join(cfg.DataDir, fileSecret))
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
