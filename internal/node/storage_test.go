package node

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/credential"
	"fleetd/internal/datadir"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

// A write of the embedded NATS fails once, as on a full disk: readyz has the
// part and what to do, and events are kept again without a restart.
func TestEmbeddedStorageRecovers(t *testing.T) {
	t.Parallel()
	const full = "/dev/full"
	if _, err := os.Stat(full); err != nil {
		t.Skip("NOT RUN: this system has no /dev/full")
	}
	n := &node{cfg: load(t, map[string]string{"event-limit": "16MiB", "notification-limit": "1MiB", "photo-limit": "1MiB", "node": "n1"}), log: quiet}
	n.dir = open(t, t.TempDir())
	var err error
	if n.bus, err = openBus(n.cfg, n.dir, testMint(t), n.log); err != nil {
		t.Fatal(err)
	}
	n.onStop(n.bus.close)
	t.Cleanup(n.stop)
	if err := n.openEvents(); err != nil {
		t.Fatal(err)
	}
	n.events.Open(devices.Alone)
	js, err := jetstream.New(n.bus.conn)
	if err != nil {
		t.Fatal(err)
	}
	state := func() (state jetstream.StreamState) {
		if stream, err := js.Stream(t.Context(), "FLEETD_V1_EVENTS"); err == nil {
			state = stream.CachedInfo().State
		}
		return state
	}
	count := 0
	publish := func(times, size int) {
		for range times {
			count++
			n.events.Publish(devices.Event{Kind: devices.EventOnline, Device: "aa:bb:cc:dd:ee:ff", Time: time.Now(),
				MsgID: fmt.Sprint("m-", count), Fields: fmt.Appendf(nil, `"x":"%s"`, bytes.Repeat([]byte("x"), size))})
		}
	}
	publish(1, 1)
	devicetest.Eventually(t, "an event is kept", func() bool { return state().Msgs == 1 })
	for name, limit := range map[string]int64{"FLEETD_V1_EVENTS": 16 << 20, "FLEETD_V1_NOTIFICATIONS": 1 << 20} {
		devicetest.Eventually(t, name+" has its own limit", func() bool {
			stream, err := js.Stream(t.Context(), name)
			return err == nil && stream.CachedInfo().Config.MaxBytes == limit
		})
	}

	// The server begins its next file, after 4 MiB, where every write fails.
	msgs := filepath.Join(n.dir.File(datadir.DirNATS), "jetstream", "$G", "streams", "FLEETD_V1_EVENTS", "msgs")
	blocks, err := filepath.Glob(filepath.Join(msgs, "*.blk"))
	if err != nil {
		t.Fatal(err)
	}
	last := 0
	for _, block := range blocks {
		var n int
		if _, err := fmt.Sscanf(filepath.Base(block), "%d.blk", &n); err != nil {
			t.Fatal(err)
		}
		last = max(last, n)
	}
	if err := os.Symlink(full, filepath.Join(msgs, fmt.Sprintf("%d.blk", last+1))); err != nil {
		t.Fatal(err)
	}
	first := state().FirstSeq
	publish(300, 20_000)
	devicetest.Eventually(t, "readyz has the part", func() bool { return n.storageError() != nil })
	before := state().LastSeq
	devicetest.Eventually(t, "events are kept again", func() bool {
		publish(1, 1)
		now := state().LastSeq
		return now > before && n.storageError() == nil
	})
	if state().FirstSeq != first {
		t.Errorf("events from before are gone: %+v", state())
	}
}

func testMint(t *testing.T) *credential.Mint {
	t.Helper()
	mint, err := credential.New([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	return mint
}
