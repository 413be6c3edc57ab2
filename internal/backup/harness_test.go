package backup

import (
	"log/slog"
	"testing"

	"fleetd/internal/config"
	"fleetd/internal/datadir"
)

var quiet = slog.New(slog.DiscardHandler)

func open(t *testing.T, path string) *datadir.Dir {
	t.Helper()
	d, err := datadir.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

func load(t *testing.T, flags map[string]string) *config.Config {
	t.Helper()
	cfg, err := config.Load(flags, nil)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}
