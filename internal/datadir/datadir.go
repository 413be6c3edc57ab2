// Package datadir is the directory of a node: its files, the lock that its node
// holds, and run.json, by which commands on the same machine find the node.
package datadir

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"fleetd/internal/credential"
	"fleetd/internal/durable"
)

// Files of the data directory.
const (
	LockFile   = "lock" // locked by its node
	RunFile    = "run.json"
	FileSecret = "secret"
	FileToken  = "admin-token"
	FilePorts  = "ports.json"
	FileAudit  = "audit-unwritten.jsonl"
	FileBegun  = "jobs-begun" // how many commits have begun tasks, as this node last knew
	DirNATS    = "nats"
	// DirFirmware has the firmware images that this node has served, which it can get again.
	DirFirmware = "firmware"
)

// Dir is the node's directory, locked while in use.
type Dir struct {
	Path string
	lock *os.File
}

// Open creates the directory if necessary and locks it.
func Open(path string) (*Dir, error) {
	if err := durable.MkdirAll(path); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(path, LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	if err := lock(file); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("--data-dir %s is in use by another fleetd; stop it or choose another directory (%w)", path, err)
	}
	// Of a node that was killed: another program may use its port now.
	if err := RemoveRunInfo(path); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	return &Dir{Path: path, lock: file}, nil
}

// Close gives the lock back.
func (d *Dir) Close() { _ = d.lock.Close() }

// File returns the path of a file of the directory.
func (d *Dir) File(name string) string { return filepath.Join(d.Path, name) }

// Write replaces a file atomically and durably; only its owner can read it. A file that has this content already is left
// alone, so that a node starts while the disk is full.
func (d *Dir) Write(name string, content []byte) error {
	if present, err := os.ReadFile(d.File(name)); err == nil && bytes.Equal(present, content) {
		return nil
	}
	if err := durable.WriteFile(d.File(name), content); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// Secret returns the given secret, or the directory's own, which it creates at the first
// start.
func (d *Dir) Secret(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	content, err := os.ReadFile(d.File(FileSecret))
	secret := strings.TrimSpace(string(content))
	switch {
	case err == nil && secret == "":
		return "", fmt.Errorf("the file %s is empty: restore it from a backup, or give the fleet's secret with --secret; if no device knows this fleet, remove the file", d.File(FileSecret))
	case err == nil:
		return secret, nil
	case !errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("read secret: %w", err)
	}
	secret = credential.NewSecret()
	return secret, d.Write(FileSecret, []byte(secret+"\n"))
}

// ReadJSON decodes a file into into; a missing or empty file changes nothing.
func (d *Dir) ReadJSON(name string, into any) error {
	content, err := os.ReadFile(d.File(name))
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(bytes.TrimSpace(content)) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if err := json.Unmarshal(content, into); err != nil {
		return fmt.Errorf("%s is damaged: %w; remove it", d.File(name), err)
	}
	return nil
}

func (d *Dir) WriteJSON(name string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return d.Write(name, text)
}
