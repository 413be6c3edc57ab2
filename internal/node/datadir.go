package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"fleetd/internal/apiclient"
	"fleetd/internal/credential"
	"fleetd/internal/durable"
)

// Files of the data directory. run.json and admin-token belong to apiclient,
// which reads them.
const (
	fileSecret = "secret"
	fileToken  = "admin-token"
	filePorts  = "ports.json"
	fileKnown  = "known.json" // of versions before the registry
	fileAudit  = "audit-unwritten.jsonl"
	fileKeyed  = "audit-keyed"
	dirNATS    = "nats"
)

// dataDir is the node's directory, locked while in use.
type dataDir struct {
	path string
	lock *os.File
}

// openDataDir makes the directory if need be and locks it.
func openDataDir(path string) (*dataDir, error) {
	if err := durable.MkdirAll(path); err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(path, apiclient.LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	if err := lock(file); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("--data-dir %s is in use by another fleetd; stop it or choose another directory (%w)", path, err)
	}
	// Of a node that was killed: it names a port that anybody may have now.
	if err := apiclient.RemoveRunInfo(path); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	return &dataDir{path, file}, nil
}

func (d *dataDir) close() { _ = d.lock.Close() }

// file names a file of the directory.
func (d *dataDir) file(name string) string { return filepath.Join(d.path, name) }

// write replaces a file in one step, readable by its owner only; it survives a
// power cut.
func (d *dataDir) write(name string, content []byte) error {
	if err := durable.WriteFile(d.file(name), content); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

// secret returns the given secret, else the directory's own, made at the first
// start.
func (d *dataDir) secret(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	content, err := os.ReadFile(d.file(fileSecret))
	if err == nil {
		return strings.TrimSpace(string(content)), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read secret: %w", err)
	}
	secret := credential.NewSecret()
	return secret, d.write(fileSecret, []byte(secret+"\n"))
}

// readJSON fills into from a file; a file that does not exist changes nothing.
func (d *dataDir) readJSON(name string, into any) error {
	content, err := os.ReadFile(d.file(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	if err := json.Unmarshal(content, into); err != nil {
		return fmt.Errorf("%s is damaged: %w; remove it", d.file(name), err)
	}
	return nil
}

func (d *dataDir) writeJSON(name string, content any) error {
	text, err := json.Marshal(content)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return d.write(name, text)
}
