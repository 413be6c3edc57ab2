package storetest_test

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"fleetd/internal/devices"
	"fleetd/internal/store"
	"fleetd/internal/store/storetest"
)

// childURL, when set, makes the test program the child of testKill: it writes
// catalogs and prints the number of each once it is reported as committed.
const childURL = "FLEETD_TEST_CHILD_URL"

func TestSQLiteSurvivesKill(t *testing.T)   { t.Parallel(); testKill(t, storetest.SQLite) }
func TestPostgresSurvivesKill(t *testing.T) { t.Parallel(); testKill(t, storetest.Postgres) }

// testKill: every catalog that was reported is in the table after kill -9.
func testKill(t *testing.T, makeDatabase storetest.Maker) {
	db := makeDatabase(t)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^$")
	child.Env = append(os.Environ(), childURL+"="+db.URL)
	child.Stderr = os.Stderr
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	var reported []int
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if len(reported) == 200 { // it is in the middle of writing; what it printed until it died counts too
			if err := child.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
		n, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatalf("the child printed %q", lines.Text())
		}
		reported = append(reported, n)
	}
	if err := child.Wait(); err == nil || len(reported) <= 200 {
		t.Fatalf("the child ended by itself after %d reports: %v", len(reported), err)
	}
	s, err := store.Open(t.Context(), db.URL, "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.Close(context.Background()); err != nil {
			t.Error(err)
		}
	}()
	for _, n := range reported {
		text := childCatalog(n)
		if got, err := s.Catalog(t.Context(), text.Hash); err != nil || string(got.Tools) != string(text.Tools) {
			t.Fatalf("catalog %d of %d was reported and is not there: %v", n, len(reported), err)
		}
		e, err := s.History(t.Context(), "x", devices.Epoch(n+1), 1, 1)
		if err != nil || len(e) != 1 || e[0].Catalog != text.Hash {
			t.Fatalf("history entry %d was reported and is not there: %v, %v", n, e, err)
		}
	}
}

func childCatalog(n int) devices.CatalogText {
	tools := fmt.Sprintf(`[{"name":"tool-%d","description":%q}]`, n, strings.Repeat("long ", 300))
	return devices.CatalogText{Hash: sha256.Sum256([]byte(tools)), Tools: json.RawMessage(tools), Count: 1}
}

// runChild writes until it is killed.
func runChild(url string) error {
	s, err := store.Open(context.Background(), url, "", slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	room := make(chan struct{}, 300)
	for n := 0; ; n++ {
		room <- struct{}{}
		text := childCatalog(n)
		s.SaveCatalog(devices.HistoryEntry{Device: "x", Epoch: devices.Epoch(n + 1), Catalog: text.Hash}, text, func() {
			fmt.Println(n)
			<-room
		})
	}
}
