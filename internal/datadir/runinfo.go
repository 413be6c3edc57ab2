package datadir

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"fleetd/internal/durable"
)

// RunInfo is what a running node leaves in its data directory, so that commands on the same machine find it.
type RunInfo struct {
	// PID is the node's process id.
	PID int `json:"pid"`
	// Node is its name, Version the program's.
	Node    string `json:"node"`
	Version string `json:"version"`
	// API and Device are the base URLs of the internal and of the devices' side, OTA the URL to type into a device,
	// NATS the client URL of the embedded NATS, empty if it has no port.
	API string `json:"api"`
	// APICert is the file of the certificate that the API shows; empty without TLS.
	APICert string `json:"api_cert,omitempty"`
	Device  string `json:"device"`
	OTA     string `json:"ota"`
	NATS    string `json:"nats,omitempty"`
	// Database is the database that the node uses, without user and password: "sqlite:/absolute/path" or
	// "postgres://host:port/name".
	Database string `json:"database,omitempty"`
	// Started is when the node came up.
	Started time.Time `json:"started"`
}

// WriteRunInfo replaces DIR/run.json in one step, readable by its owner only.
func WriteRunInfo(dir string, info RunInfo) error {
	content, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", RunFile, err)
	}
	if err := durable.WriteFile(filepath.Join(dir, RunFile), append(content, '\n')); err != nil {
		return fmt.Errorf("write %s: %w", RunFile, err)
	}
	return nil
}

// ReadRunInfo reads DIR/run.json. The error wraps [fs.ErrNotExist] if no node runs there.
func ReadRunInfo(dir string) (RunInfo, error) {
	path := filepath.Join(dir, RunFile)
	content, err := os.ReadFile(path)
	if err != nil {
		return RunInfo{}, err
	}
	var info RunInfo
	if err := json.Unmarshal(content, &info); err != nil {
		return RunInfo{}, fmt.Errorf("%s: %w", path, err)
	}
	return info, nil
}

// RemoveRunInfo removes DIR/run.json; that it is gone already is not an error.
func RemoveRunInfo(dir string) error {
	err := os.Remove(filepath.Join(dir, RunFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
