package apiclient

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"fleetd/internal/datadir"
)

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
	content, err := os.ReadFile(filepath.Join(dataDir, datadir.FileToken))
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
	info, err := datadir.ReadRunInfo(dataDir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w found in %s; start one with `fleetd serve`, or give --api URL and --token", ErrNoNode, dataDir)
	case err != nil:
		return nil, fmt.Errorf("cannot read where the node of %s runs: %w", dataDir, err)
	}
	// A killed node leaves its file, and any process may listen on its port since.
	running, err := datadir.Running(dataDir)
	switch {
	case err != nil:
		return nil, fmt.Errorf("cannot find out whether the node of %s runs: %w", dataDir, err)
	case !running:
		return nil, fmt.Errorf("%w: the one of %s ended without a stop; start it with `fleetd serve`, or give --api URL and --token", ErrNoNode, dataDir)
	}
	c, err := New(dialable(info.API), "")
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dataDir, datadir.RunFile), err)
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

// Local reports whether the client found its node in a data directory, where the node
// keeps the admin token.
func (c *Client) Local() (dir string, ok bool) { return c.local, c.local != "" }

// HasToken reports whether the client shows this token.
func (c *Client) HasToken(token string) bool { return c.token == token }
