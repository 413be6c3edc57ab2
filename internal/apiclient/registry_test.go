package apiclient

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"fleetd/internal/api"
)

// A file that the server refuses at once is not sent.
func TestImportRefusedAtOnce(t *testing.T) {
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprint(w, `{"code":"forbidden","detail":"no"}`)
	})
	file := &counter{left: 256 << 20}
	_, err := c.ImportDevices(t.Context(), file, ImportOptions{Format: FormatCSV, Size: int64(file.left)})
	var problem *Problem
	if !errors.As(err, &problem) || problem.Code != "forbidden" {
		t.Fatalf("%v", err)
	}
	if sent := 256<<20 - file.left; sent > 1<<20 {
		t.Errorf("%d bytes were read from the file", sent)
	}
}

// counter is a file of commas.
type counter struct{ left int }

func (c *counter) Read(p []byte) (int, error) {
	n := min(len(p), c.left)
	for i := range p[:n] {
		p[i] = ','
	}
	c.left -= n
	return n, nil
}

func TestImportFaults(t *testing.T) {
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		fmt.Fprint(w, `{"code":"invalid_arguments","detail":"2 rows have a fault","refused":2,"faults":[{"line":2,"column":4,"detail":"x"}]}`)
	})
	report, err := c.ImportDevices(t.Context(), strings.NewReader("id\n"), ImportOptions{Format: FormatCSV})
	var problem *Problem
	if !errors.As(err, &problem) || problem.Error() != "2 rows have a fault (invalid_arguments)" {
		t.Errorf("%v", err)
	}
	if want := (api.ImportReport{Refused: 2, Faults: []api.LineFault{{Line: 2, Column: 4, Detail: "x"}}}); !reflect.DeepEqual(report, want) {
		t.Errorf("%+v", report)
	}
}

func TestRevocation(t *testing.T) {
	status, answer := http.StatusNoContent, ""
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, answer)
	})
	if r, err := c.Revoke(t.Context(), "d"); err != nil || !r.Recorded {
		t.Errorf("%+v, %v", r, err)
	}
	status, answer = http.StatusAccepted, `{"recorded":false,"nodes":["n-1"]}`
	if r, err := c.RevokeKey(t.Context(), "k"); err != nil || r.Recorded || !reflect.DeepEqual(r.Nodes, []string{"n-1"}) {
		t.Errorf("%+v, %v", r, err)
	}
	status, answer = http.StatusNotFound, `{"code":"device_unknown"}`
	if _, err := c.Revoke(t.Context(), "d"); err == nil {
		t.Error("a refusal is a success")
	}
}

func TestSelection(t *testing.T) {
	for text, want := range map[string]string{`"room=lab"`: "room=lab", `{"room":"lab","floor":"1"}`: "floor=1,room=lab", `{}`: "", `null`: ""} {
		var got api.Key
		if err := json.Unmarshal([]byte(`{"devices":`+text+`}`), &got); err != nil || got.Devices.String() != want {
			t.Errorf("%s: %q, %v", text, got.Devices, err)
		}
	}
	if json.Unmarshal([]byte(`{"devices":5}`), new(api.Key)) == nil {
		t.Error("a number is a selection")
	}
}

func TestReady(t *testing.T) {
	status, answer := http.StatusServiceUnavailable, `{"ready":false,"down":{"nats":"gone","database":"refused"}}`
	c := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, answer)
	})
	if err := c.Ready(t.Context()); err == nil || err.Error() != "the node at "+c.Base()+" is not ready: database: refused; nats: gone" {
		t.Errorf("%v", err)
	}
	answer = "bad gateway"
	if err := c.Ready(t.Context()); err == nil || err.Error() != "bad gateway (HTTP 503)" {
		t.Errorf("%v", err)
	}
	status = http.StatusOK
	if err := errors.Join(c.Ready(t.Context()), c.Live(t.Context())); err != nil {
		t.Error(err)
	}
}
