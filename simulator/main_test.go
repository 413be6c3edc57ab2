package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/simulator/firmware"
)

// fakeServer gives every device a WebSocket, and hands over those that have sent a hello.
func fakeServer(t *testing.T) (ota string, conns <-chan *websocket.Conn) {
	t.Helper()
	accepted := make(chan *websocket.Conn, 10)
	var server *httptest.Server
	mux := http.NewServeMux()
	mux.HandleFunc("/xiaozhi/ota/", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"websocket":{"url":"`+strings.Replace(server.URL, "http", "ws", 1)+`/ws","token":"t"}}`)
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		c, err := new(websocket.Upgrader).Upgrade(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		if _, text, err := c.ReadMessage(); err != nil || !strings.Contains(string(text), `"type":"hello"`) {
			t.Errorf("first message %s, %v", text, err)
		}
		accepted <- c
	})
	server = httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL + "/xiaozhi/ota/", accepted
}

func TestFlags(t *testing.T) {
	parse := func(args ...string) (*options, error) { return parseFlags(args, io.Discard) }
	o, err := parse("--transport", "websocket", "--profile", "fw-2.4,robot", "--ramp", "100/s", "--fault", "slow:2,silent", "--seed", "9")
	if err != nil {
		t.Fatal(err)
	}
	if o.OTA != "http://127.0.0.1:8000/xiaozhi/ota/ws/" || len(o.Profiles) != 2 || o.Ramp != 100 || o.Seed != 9 || o.Devices != 3 {
		t.Errorf("options %+v", o)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--nonsense"}, "nonsense"},
		{[]string{"extra"}, "extra"},
		{[]string{"--transport", "pigeon"}, "pigeon"},
		{[]string{"--log", "loud"}, "loud"},
		{[]string{"--reconnect", "-1s"}, "--reconnect"},
		{[]string{"--fault", "gremlins"}, "gremlins"},
		{[]string{"--fault", "slow:x"}, "slow:x"},
		{[]string{"--profile", "fw-0.1"}, "fw-0.1"},
		{[]string{"--ramp", "0/s"}, "--ramp"},
		{[]string{"--mac-base", "zz"}, "--mac-base"},
		{[]string{"--report", "xml"}, "xml"},
		{[]string{"--devices", "0"}, "--devices"},
		{[]string{"--time-scale", "0"}, "--time-scale"},
		{[]string{"--ota", "ftp://h/"}, "--ota"},
		{[]string{"--photo-size", "1x1"}, "--photo-size"},
	} {
		if _, err := parse(tt.args...); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%v: %v, want a sentence about %s", tt.args, err, tt.want)
		}
	}
	var help strings.Builder
	if _, err := parseFlags([]string{"--help"}, &help); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("--help: %v", err)
	}
	for _, name := range []string{"-ota", "-devices", "-fault", "-time-scale", "-report-file"} {
		if !strings.Contains(help.String(), name) {
			t.Errorf("help does not list %s", name)
		}
	}
}

func TestReportOfAWholeRun(t *testing.T) {
	ota, conns := fakeServer(t)
	file := filepath.Join(t.TempDir(), "report.json")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var out bytes.Buffer
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, []string{"--ota", ota, "--devices", "2", "--duration", "500ms", "--profile", "fw-2.4,robot",
			"--report", "json", "--report-file", file, "--seed", "5"}, &out, io.Discard)
	}()
	for range 2 {
		c := <-conns
		for _, text := range []string{`{"type":"hello","transport":"websocket","session_id":"s"}`,
			`{"session_id":"s","type":"mcp","payload":{"jsonrpc":"2.0","method":"tools/call","params":{"name":"self.get_device_status","arguments":{"marker":"once"}},"id":1}}`, `{"type":"noop"}`} {
			if err := c.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	saved, err := os.ReadFile(file)
	if err != nil || !bytes.Equal(saved, out.Bytes()) {
		t.Errorf("file and standard output differ: %v", err)
	}
	var r struct {
		Seed    uint64
		Devices []firmware.DeviceReport
		Totals  firmware.Totals
	}
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, out.Bytes())
	}
	if r.Seed != 5 || len(r.Devices) != 2 || r.Devices[1].Profile != "robot" || r.Devices[0].State != firmware.StateConnected {
		t.Errorf("devices %+v", r.Devices)
	}
	if r.Totals.Connected != 2 || r.Totals.CallsTotal != 2 || r.Totals.Noops != 2 || r.Totals.HelloMS.Max <= 0 || r.Totals.Disconnects != 0 {
		t.Errorf("totals %+v", r.Totals)
	}
	var text bytes.Buffer
	w := bufio.NewWriter(&text)
	snapshot := &firmware.Report{Devices: r.Devices, Totals: r.Totals}
	if err := writeText(w, snapshot); err != nil || w.Flush() != nil || !strings.Contains(text.String(), "connected") || !strings.Contains(text.String(), `marker "once" executed 2 x`) {
		t.Errorf("text report %q, %v", text.String(), err)
	}
}

// The files of --images can be written for several profiles at once, and no device runs.
func TestImages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "images")
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--images", dir, "--profile", "fw-2.4,robot", "--image-version", "2.5.0"}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for _, name := range []string{"lichuang-dev-2.5.0.bin", "v2.5.0_lichuang-dev.zip", "otto-robot-2.5.0.bin", "v2.5.0_otto-robot.zip"} {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
		want.WriteString(path + "\n")
	}
	if out.String() != want.String() {
		t.Errorf("output %q", out.String())
	}
}
