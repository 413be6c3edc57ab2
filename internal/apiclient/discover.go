package apiclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"fleetd/internal/durable"
)

// LockFile is the file of a data directory whose lock its node holds.
const LockFile = "lock"

const (
	runFile   = "run.json"
	tokenFile = "admin-token"
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
	// Database says which database the node uses, without user and password: "sqlite:/absolute/path" or
	// "postgres://host:port/name".
	Database string `json:"database,omitempty"`
	// Started is when the node came up.
	Started time.Time `json:"started"`
}

// WriteRunInfo replaces DIR/run.json in one step, readable by its owner only.
func WriteRunInfo(dir string, info RunInfo) error {
	content, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", runFile, err)
	}
	if err := durable.WriteFile(filepath.Join(dir, runFile), append(content, '\n')); err != nil {
		return fmt.Errorf("write %s: %w", runFile, err)
	}
	return nil
}

// ReadRunInfo reads DIR/run.json. The error wraps [fs.ErrNotExist] if no node runs there.
func ReadRunInfo(dir string) (RunInfo, error) {
	path := filepath.Join(dir, runFile)
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
	err := os.Remove(filepath.Join(dir, runFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Discover returns a client of the node at api, or, if that is empty, of the node running in dataDir. An empty token
// means the admin token of dataDir, which is only ever sent to the node of dataDir: to an address given by the user
// goes the token given by the user, or none.
func Discover(dataDir, api, token string) (*Client, error) {
	c, err := Locate(dataDir, api)
	if err != nil {
		return nil, err
	}
	c.token = token
	if c.local == "" || token != "" {
		return c, nil
	}
	content, err := os.ReadFile(filepath.Join(dataDir, tokenFile))
	// A node that requires no token keeps none.
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("cannot read the admin token (run this as the user the node runs as, or give --token): %w", err)
	}
	c.token = strings.TrimSpace(string(content))
	return c, nil
}

// Locate is Discover for requests that need no token.
func Locate(dataDir, api string) (*Client, error) {
	if api != "" {
		c, err := New(api, "")
		if err != nil {
			return nil, fmt.Errorf("--api: %w", err)
		}
		return c, nil
	}
	info, err := ReadRunInfo(dataDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w found in %s; start one with `fleetd serve`, or give --api URL and --token", ErrNoNode, dataDir)
	case err != nil:
		return nil, fmt.Errorf("cannot read where the node of %s runs: %w", dataDir, err)
	}
	// A node that was killed leaves its file behind, and anybody may listen on its port since.
	running, err := Running(dataDir)
	switch {
	case err != nil:
		return nil, fmt.Errorf("cannot tell whether the node of %s runs: %w", dataDir, err)
	case !running:
		return nil, fmt.Errorf("%w: the one of %s ended without a stop; start it with `fleetd serve`, or give --api URL and --token", ErrNoNode, dataDir)
	}
	c, err := New(dialable(info.API), "")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dataDir, runFile), err)
	}
	c.local = dataDir
	if info.APICert != "" {
		c.http.Transport = pinned(info.APICert)
	}
	return c, nil
}

// dialable turns the address a node listens on into one that can be dialled from the same machine: a listener on all
// addresses answers on loopback.
func dialable(api string) string {
	scheme, rest, found := strings.Cut(api, "://")
	if !found {
		scheme, rest = "http", api
	}
	authority, path, _ := strings.Cut(rest, "/")
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		return api
	}
	if ip, err := netip.ParseAddr(host); host == "" || (err == nil && ip.IsUnspecified()) {
		host = "127.0.0.1"
	}
	return strings.TrimRight(scheme+"://"+net.JoinHostPort(host, port)+"/"+path, "/")
}
