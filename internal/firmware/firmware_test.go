package firmware_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/devices"
	"fleetd/internal/espimage/imagetest"
	"fleetd/internal/firmware"
	"fleetd/internal/natstest"
	"fleetd/internal/preflight"
	"fleetd/internal/selector"
	"fleetd/internal/store"
	"fleetd/internal/store/firmwarestore"
)

// TestMain looks for goroutines that were left. One of nats.go v1.55 stays for ever if the connection ends while the first message is
// published: the channel on which it waits for reconnects is nil then (jetstream/publish.go:570).
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("github.com/nats-io/nats.go/jetstream.(*jetStream).resetPendingAcksOnReconnect"))
}

// core is the part of the fleet that a Manager uses, with these devices.
type core struct {
	views []devices.View
	mu    sync.Mutex
	notes []string
}

func (c *core) Views(_ context.Context, ids []devices.ID) (list []devices.View, _ error) {
	for _, v := range c.views {
		if slices.Contains(ids, v.Device.ID) {
			list = append(list, v)
		}
	}
	return list, nil
}

func (c *core) Get(_ context.Context, id devices.ID) (devices.View, error) {
	for _, v := range c.views {
		if v.Device.ID == id {
			return v, nil
		}
	}
	return devices.View{}, devices.ErrNotFound
}

func (c *core) List(context.Context, devices.ListQuery) ([]devices.View, string, error) {
	return c.views, "", nil
}

func (c *core) Each(_ context.Context, _ access.Principal, _ selector.Selector, f func([]devices.View) error) error {
	return f(c.views)
}

func (c *core) NoteChange(_ access.Principal, action string, _ devices.ID, detail string, err error) {
	outcome := "ok"
	if err != nil {
		outcome = string(devices.AsError(err).Code)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notes = append(c.notes, action+" "+detail+" "+outcome)
}

func (c *core) noted(t *testing.T, want ...string) {
	t.Helper()
	if !slices.Equal(c.notes, want) {
		t.Errorf("audit %q, want %q", c.notes, want)
	}
	c.notes = nil
}

// fleet is a fleet with the files of one of its nodes.
type fleet struct {
	*firmware.Manager
	core  *core
	store *store.Store
	js    jetstream.JetStream
	opt   firmware.Options
}

func newFleet(t *testing.T, change func(*firmware.Options)) *fleet {
	t.Helper()
	conn, err := nats.Connect("", nats.InProcessServer(natstest.Start(t, server.Options{DontListen: true, JetStream: true, StoreDir: t.TempDir()})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	f := &fleet{core: &core{}}
	if f.js, err = jetstream.New(conn); err != nil {
		t.Fatal(err)
	}
	if f.store, err = store.Open(t.Context(), "sqlite", t.TempDir(), slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.store.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := f.store.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.opt = firmware.Options{Store: firmwarestore.New(f.store), Fleet: f.core, JetStream: f.js, Bucket: "TEST_FIRMWARE", MaxFile: 32 << 20, Storage: 1 << 20,
		Server: "https://api.example.com", Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&f.opt)
	}
	f.Manager = f.node(t)
	return f
}

// node is another node of the fleet, with a disk of its own.
func (f *fleet) node(t *testing.T) *firmware.Manager {
	o := f.opt
	o.Dir = filepath.Join(t.TempDir(), "firmware")
	if o.Bars == nil {
		o.Bars = func(context.Context, []devices.ID) (map[devices.ID]string, error) { return nil, nil }
	}
	if o.InUse == nil {
		o.InUse = func(context.Context, string) (string, error) { return "", nil }
	}
	return firmware.New(o)
}

// files are the names in the directory of a node.
func files(t *testing.T, m *firmware.Manager) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(m.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// age makes the files of a node two hours old.
func age(t *testing.T, m *firmware.Manager) {
	t.Helper()
	for _, name := range files(t, m) {
		if err := os.Chtimes(filepath.Join(m.Dir, name), time.Time{}, time.Now().Add(-2*time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
}

var admin = access.Principal{Caller: access.Admin}

func upload(content []byte) firmware.Upload {
	return firmware.Upload{File: bytes.NewReader(content), Size: int64(len(content)), Note: "note"}
}

func idOf(image []byte) string {
	sum := sha256.Sum256(image)
	return hex.EncodeToString(sum[:])
}

func (f *fleet) mustAdd(t *testing.T, content []byte, fresh bool) api.AddedFirmware {
	t.Helper()
	added, got, err := f.Add(t.Context(), admin, upload(content))
	if err != nil || got != fresh {
		t.Fatalf("fresh %v, error %v", got, err)
	}
	return added
}

func read(t *testing.T, m *firmware.Manager, id string) []byte {
	t.Helper()
	_, file, err := m.Open(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	content, err := io.ReadAll(file)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func codeOf(err error) string {
	if err == nil {
		return ""
	}
	return string(devices.AsError(err).Code)
}

func image(board string) []byte {
	return imagetest.Build{Chip: 9, Literals: imagetest.Literals(board), Segments: [][]byte{bytes.Repeat([]byte(board), 4*4096)}}.Image()
}

func TestAdd(t *testing.T) {
	f := newFleet(t, nil)
	one, two := image("one"), image("two")
	zip := imagetest.Zip(t, map[string][]byte{"one.bin": one, "two.bin": imagetest.Merged(two), "again.bin": one, "readme.bin": []byte("x")})
	dry := upload(zip)
	dry.DryRun = true
	if added, fresh, err := f.Add(t.Context(), admin, dry); err != nil || !fresh || len(added.Items) != 3 || len(files(t, f.Manager)) != 0 {
		t.Errorf("%+v, %v, error %v", added, fresh, err)
	}
	f.core.noted(t)
	added := f.mustAdd(t, zip, true)
	if len(added.Items) != 3 || len(added.Dropped) != 1 || added.Items[1].Note != "note" || added.Items[1].AddedBy != "admin token" || *added.Items[1].Devices != 0 {
		t.Errorf("%+v", added)
	}
	f.core.noted(t, "add_firmware "+idOf(one)+" ok", "add_firmware "+idOf(two)+" ok")
	if got := files(t, f.Manager); len(got) != 2 {
		t.Errorf("files %q", got)
	}
	f.mustAdd(t, one, false)
	f.core.noted(t)
	if got := read(t, f.Manager, idOf(two)[:12]); !bytes.Equal(got, two) {
		t.Error("other bytes")
	}
	if x, err := f.Get(t.Context(), admin, strings.ToUpper(idOf(one))); err != nil || x.ID != idOf(one) {
		t.Errorf("%+v, error %v", x, err)
	}
	list, err := f.List(t.Context(), admin, firmware.Filter{Board: "two"})
	if err != nil || len(list) != 1 || list[0].ID != idOf(two) || list[0].Kind != "merged" {
		t.Errorf("%+v, error %v", list, err)
	}
	for _, filter := range []firmware.Filter{{Version: "1"}, {Kind: "application", Board: "two"}, {Board: "three"}} {
		if list, err := f.List(t.Context(), admin, filter); err != nil || len(list) != 0 {
			t.Errorf("%+v: %+v, error %v", filter, list, err)
		}
	}
	for id, want := range map[string]string{"abc": "bad_request", "xyzxyzxyzxyz": "bad_request", strings.Repeat("0", 64): "not_found", idOf(one) + "0": "bad_request", "../" + idOf(one)[:12]: "bad_request"} {
		if _, err := f.Get(t.Context(), admin, id); codeOf(err) != want {
			t.Errorf("%s: error %v", id, err)
		}
	}
}

// TestAddAtOnce: of uploads of one image at the same time, one is new.
func TestAddAtOnce(t *testing.T) {
	f := newFleet(t, nil)
	var wait sync.WaitGroup
	var fresh atomic.Int32
	for range 4 {
		wait.Go(func() {
			_, added, err := f.Add(t.Context(), admin, upload(image("one")))
			if err != nil {
				t.Error(err)
			}
			if added {
				fresh.Add(1)
			}
		})
	}
	wait.Wait()
	if fresh.Load() != 1 {
		t.Errorf("%d of 4 are new", fresh.Load())
	}
	f.core.noted(t, "add_firmware "+idOf(image("one"))+" ok")
}

// TestNodesAtOnce: an image that two nodes add and delete at once has its bytes as long as it has its row.
func TestNodesAtOnce(t *testing.T) {
	f := newFleet(t, nil)
	nodes := []*firmware.Manager{f.Manager, f.node(t)}
	add := func(m *firmware.Manager) error {
		_, _, err := m.Add(t.Context(), admin, upload(image("one")))
		return err
	}
	remove := func(m *firmware.Manager) error {
		if err := m.Delete(t.Context(), admin, idOf(image("one")), true); codeOf(err) != "not_found" {
			return err
		}
		return nil
	}
	for name, c := range map[string]struct {
		before bool // the image is stored
		with   []int
		do     []func(*firmware.Manager) error
	}{
		"two nodes add":                     {false, []int{0, 1}, []func(*firmware.Manager) error{add, add}},
		"one deletes what another adds":     {true, []int{0, 1}, []func(*firmware.Manager) error{remove, add}},
		"one deletes what it adds, too":     {true, []int{0, 0}, []func(*firmware.Manager) error{remove, add}},
		"and the other one adds it as well": {true, []int{0, 0, 1}, []func(*firmware.Manager) error{remove, add, add}},
	} {
		for round := range 10 {
			if err := remove(nodes[round%2]); err != nil {
				t.Fatal(err)
			}
			if c.before {
				f.mustAdd(t, image("one"), true)
			}
			var wait sync.WaitGroup
			for i, do := range c.do {
				wait.Go(func() {
					if err := do(nodes[c.with[i]]); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				})
			}
			wait.Wait()
			_, file, err := f.node(t).Open(t.Context(), idOf(image("one")))
			if codeOf(err) == "not_found" && c.before {
				continue
			}
			if err != nil {
				t.Errorf("%s, round %d: %v", name, round, err)
				break
			}
			_ = file.Close() // it was only read
		}
	}
}

// TestUploadsWithFaults: nothing of a file with a fault is kept, and every fault is named.
func TestUploadsWithFaults(t *testing.T) {
	f := newFleet(t, nil)
	good := image("good")
	damaged := bytes.Clone(good)
	damaged[len(damaged)-100] ^= 1
	old := imagetest.Build{Version: "1.7.7"}.Image()
	zip := imagetest.Zip(t, map[string][]byte{"a.bin": good, "b.bin": damaged, "c.bin": old})
	announced := upload(good)
	announced.SHA256 = idOf(damaged)
	for name, c := range map[string]struct {
		u    firmware.Upload
		want string
	}{
		"a zip with two faults":       {upload(zip), "checksum hash version_too_old"},
		"another SHA-256":             {announced, "sha256"},
		"a version that aborts":       {upload(imagetest.Build{Version: "latest"}.Image()), "version_aborts"},
		"no firmware":                 {upload([]byte("<html>")), "unknown_format"},
		"nothing":                     {upload(nil), "unknown_format"},
		"an image that ends early":    {upload(good[:len(good)/2]), "truncated"},
		"a zip that is larger inside": {upload(imagetest.Zip(t, map[string][]byte{"a.bin": make([]byte, 33<<20)})), "too_large"},
	} {
		_, _, err := f.Add(t.Context(), admin, c.u)
		var problem *devices.Error
		var codes []string
		if errors.As(err, &problem) {
			for _, x := range problem.Findings {
				codes = append(codes, x.Code)
			}
		}
		// security: D23
		if got := strings.Join(codes, " "); codeOf(err) != "image_invalid" || got != c.want {
			t.Errorf("%s: %q, error %v", name, got, err)
		}
		if len(f.core.notes) != 1 || !strings.HasSuffix(f.core.notes[0], " image_invalid") {
			t.Errorf("%s: audit %q", name, f.core.notes)
		}
		f.core.notes = nil
	}
	if list, err := f.List(t.Context(), admin, firmware.Filter{}); err != nil || len(list) != 0 || len(files(t, f.Manager)) != 0 {
		t.Errorf("%+v, files %q, error %v", list, files(t, f.Manager), err)
	}
}

// TestStorage: beyond --firmware-storage nothing is added, not even a part of a file.
func TestStorage(t *testing.T) {
	one, two := image("one"), image("two")
	f := newFleet(t, func(o *firmware.Options) { o.Storage = int64(len(one) + len(two)/2) })
	f.mustAdd(t, one, true)
	f.core.notes = nil
	for _, content := range [][]byte{two, imagetest.Zip(t, map[string][]byte{"one.bin": one, "two.bin": two})} {
		if _, _, err := f.Add(t.Context(), admin, upload(content)); codeOf(err) != "limit_reached" || !strings.Contains(err.Error(), "--firmware-storage") {
			t.Errorf("error %v", err)
		}
		f.core.noted(t, "add_firmware file "+idOf(content)+" limit_reached")
	}
	if got := files(t, f.Manager); !slices.Equal(got, []string{idOf(one)}) {
		t.Errorf("files %q", got)
	}
	f.mustAdd(t, one, false)
	if err := f.Delete(t.Context(), admin, idOf(one), false); err != nil {
		t.Error(err)
	}
	f.mustAdd(t, two, true)
}

// TestFullServer: NATS has no room for the image.
func TestFullServer(t *testing.T) {
	f := newFleet(t, nil)
	if _, err := f.js.CreateObjectStore(t.Context(), jetstream.ObjectStoreConfig{Bucket: "TEST_FIRMWARE", MaxBytes: 16 << 10}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.Add(t.Context(), admin, upload(image("one"))); codeOf(err) != "limit_reached" {
		t.Errorf("error %v", err)
	}
	if list, err := f.List(t.Context(), admin, firmware.Filter{}); err != nil || len(list) != 0 || len(files(t, f.Manager)) != 0 {
		t.Errorf("%+v, files %q, error %v", list, files(t, f.Manager), err)
	}
}

// TestFilesOfNodes: a node that lacks the file, or has a damaged one, gets it from the object store, and serves nothing that has not the
// SHA-256 of the image.
func TestFilesOfNodes(t *testing.T) {
	f := newFleet(t, nil)
	one := image("one")
	id := idOf(one)
	f.mustAdd(t, one, true)
	other := f.node(t)
	if got := read(t, other, id); !bytes.Equal(got, one) || !slices.Equal(files(t, other), []string{id}) {
		t.Errorf("other bytes; files %q", files(t, other))
	}
	for _, content := range [][]byte{one[:len(one)-1], {}, append([]byte{1}, one[1:]...)} {
		if err := os.WriteFile(filepath.Join(other.Dir, id), content, 0o600); err != nil {
			t.Fatal(err)
		}
		// security: D23
		if got := read(t, other, id); !bytes.Equal(got, one) {
			t.Error("damaged bytes are served")
		}
	}
	// The object itself is damaged, or lost: nodes with the file go on, others say so, and the same upload repairs it.
	objects, err := f.js.ObjectStore(t.Context(), "TEST_FIRMWARE")
	if err != nil {
		t.Fatal(err)
	}
	for _, lose := range []func() error{
		func() error { _, err := objects.PutBytes(t.Context(), id, []byte("damaged")); return err },
		func() error { return objects.Delete(t.Context(), id) },
		func() error { return f.js.DeleteObjectStore(t.Context(), "TEST_FIRMWARE") },
	} {
		if err := lose(); err != nil {
			t.Fatal(err)
		}
		if got := read(t, f.Manager, id); !bytes.Equal(got, one) {
			t.Error("other bytes")
		}
		third := f.node(t)
		if _, _, err := third.Open(t.Context(), id); codeOf(err) != "unavailable" || !strings.Contains(err.Error(), "add the same file again") {
			t.Errorf("error %v", err)
		}
		if got := files(t, third); len(got) != 0 {
			t.Errorf("files %q", got)
		}
		f.mustAdd(t, one, false)
		if got := read(t, third, id); !bytes.Equal(got, one) {
			t.Error("not repaired")
		}
		// So does a node that has the file and starts, if the object is gone.
		if err := objects.Delete(t.Context(), id); err == nil {
			other.Tidy(t.Context())
			if got := read(t, f.node(t), id); !bytes.Equal(got, one) {
				t.Error("not repaired")
			}
		}
	}
	// What a killed upload and a deletion elsewhere left goes after a while.
	if err := os.WriteFile(filepath.Join(other.Dir, "new-123"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	other.Tidy(t.Context())
	if got := files(t, other); !slices.Equal(got, []string{id, "new-123"}) {
		t.Errorf("files %q", got)
	}
	age(t, other)
	other.Tidy(t.Context())
	if got := files(t, other); !slices.Equal(got, []string{id}) {
		t.Errorf("files %q", got)
	}
	if err := f.Delete(t.Context(), admin, id, false); err != nil {
		t.Error(err)
	}
	other.Tidy(t.Context())
	if len(files(t, other))+len(files(t, f.Manager)) != 0 {
		t.Errorf("files %q", files(t, other))
	}
	firmware.New(f.opt).Tidy(t.Context()) // it has no directory
}

// TestLeftovers: bytes that a killed node wrote without their row need room until they are deleted after a while.
func TestLeftovers(t *testing.T) {
	one, two := image("one"), image("two")
	f := newFleet(t, func(o *firmware.Options) { o.Storage = int64(len(one) + len(two)) })
	f.Tidy(t.Context()) // there is no object store
	f.mustAdd(t, one, true)
	objects, err := f.js.ObjectStore(t.Context(), "TEST_FIRMWARE")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := objects.PutBytes(t.Context(), idOf(image("three")), two[:len(two)/2]); err != nil {
		t.Fatal(err)
	}
	if _, err := f.js.Publish(t.Context(), "$O.TEST_FIRMWARE.C.nuid", two); err != nil { // of an upload that did not end
		t.Fatal(err)
	}
	if _, _, err := f.Add(t.Context(), admin, upload(two)); codeOf(err) != "limit_reached" {
		t.Errorf("error %v", err)
	}
	left := func() int {
		stream, err := f.js.Stream(t.Context(), "OBJ_TEST_FIRMWARE")
		if err != nil {
			t.Fatal(err)
		}
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter("$O.TEST_FIRMWARE.C.>"))
		if err != nil {
			t.Fatal(err)
		}
		return len(info.State.Subjects)
	}
	if f.Tidy(t.Context()); left() != 3 {
		t.Errorf("%d chunks; those of an upload that may have its row soon are kept", left())
	}
	defer firmware.SetUnusedTime(0)()
	if f.Tidy(t.Context()); left() != 1 {
		t.Errorf("%d chunks", left())
	}
	f.mustAdd(t, two, true)
	if got := read(t, f.node(t), idOf(one)); !bytes.Equal(got, one) {
		t.Error("other bytes")
	}
	// A node that has the file of a deleted image does not bring it back, also if the database was away when it started.
	if err := f.Delete(t.Context(), admin, idOf(one), false); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.Dir, idOf(one)), one, 0o600); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f.Tidy(ended)
	if _, err := objects.GetInfo(t.Context(), idOf(one)); !errors.Is(err, jetstream.ErrObjectNotFound) {
		t.Errorf("error %v", err)
	}
}

// TestLimitedKeys: a key that is limited reads images, and changes none.
func TestLimitedKeys(t *testing.T) {
	f := newFleet(t, nil)
	id := f.mustAdd(t, image("one"), true).Items[0].ID
	f.core.notes = nil
	room, err := selector.Parse("room=lab")
	if err != nil {
		t.Fatal(err)
	}
	note := "x"
	for _, caller := range []*access.Caller{access.NewCaller("k", "k", access.AllScopes(), room, nil), access.NewCaller("k", "k", access.AllScopes(), selector.Selector{}, []string{"self.*"})} {
		by := access.Principal{Caller: caller}
		// security: K44
		if err := firmware.PermitChange(by); codeOf(err) != "forbidden" {
			t.Errorf("error %v", err)
		}
		if _, err := f.Edit(t.Context(), by, id, api.FirmwareEdit{Note: &note}); codeOf(err) != "forbidden" {
			t.Errorf("error %v", err)
		}
		if err := f.Delete(t.Context(), by, id, true); codeOf(err) != "forbidden" {
			t.Errorf("error %v", err)
		}
		f.core.noted(t, "edit_firmware "+id+" forbidden", "delete_firmware "+id+" forbidden")
		got, err := f.Get(t.Context(), by, id)
		if err != nil || (got.Devices == nil) != caller.Limited() {
			t.Errorf("%+v, error %v", got, err)
		}
		list, err := f.List(t.Context(), by, firmware.Filter{})
		if err != nil || len(list) != 1 {
			t.Fatalf("%+v, error %v", list, err)
		}
		// security: K8
		if got.AddedBy != "" || list[0].AddedBy != "" {
			t.Errorf("a limited key learns the name of a key: %q, %q", got.AddedBy, list[0].AddedBy)
		}
	}
}

// details are those of a device that could get image(board).
const details = `{"flash_size":16777216,"chip_info":{"revision":102},"application":{"name":"xiaozhi","compile_time":"Aug  8 2026T08:40:00Z","idf_version":"v5.5.2"},` +
	`"partition_table":[{"label":"ota_0","type":0,"subtype":16,"address":131072,"size":1048576},{"label":"ota_1","type":0,"subtype":17,"address":1179648,"size":1048576},{"label":"assets","type":1,"subtype":130,"address":0,"size":1048576}],` +
	`"ota":{"label":"ota_1"},"display":{"width":320,"height":240}}`

// device adds a device that has checked in with an image.
func (f *fleet) device(t *testing.T, id devices.ID, board, elf, details string) {
	t.Helper()
	facts := devices.Facts{Board: board, Firmware: "2.4.1", ELF: elf, Chip: "esp32s3", CheckedAt: time.Now()}
	v := devices.View{Device: devices.Device{ID: id, Admission: devices.AdmissionMember, Facts: facts}, State: devices.StateOffline}
	f.core.views = append(slices.DeleteFunc(f.core.views, func(v devices.View) bool { return v.Device.ID == id }), v)
	if _, err := f.store.Database().Write.Exec(`INSERT INTO devices (device, admission, client_id, name, name_folded, labels, preferred_transport, joined, revision, board, board_folded, firmware, firmware_key, elf_sha256, chip, language, serial, activate_v2, first_seen, checked_at)
 VALUES ($1, 'member', '', '', '', '{}', '', '', 0, '', '', '', '', '', '', '', '', FALSE, 0, 0) ON CONFLICT (device) DO NOTHING`, string(id)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		facts.CheckedAt = time.Now()
		f.store.SaveFacts(devices.Check{Device: id, Facts: facts, Details: details})
		for f.store.Stats().DevicesWaiting.Load() > 0 {
			time.Sleep(time.Millisecond)
		}
	}
}

// TestCheck: each device is judged with the image for its board, by what it said at its last check.
func TestCheck(t *testing.T) {
	f := newFleet(t, nil)
	one, two, other := image("one"), image("two"), imagetest.Build{Project: "other", Version: "2.4.2"}.Image()
	f.mustAdd(t, imagetest.Zip(t, map[string][]byte{"a.bin": one, "b.bin": two}), true)
	f.device(t, "a", "one", "elf", details)
	f.device(t, "b", "two", "elf", details)
	f.device(t, "c", "three", "elf", details)
	f.device(t, "d", "one", "elf", devices.UnreadableDetails)
	f.device(t, "e", "one", "elf", `{"flash_size":"16777216"}`) // not as the firmware says it
	f.device(t, "f", "one", "elf", `{}`)
	f.device(t, "g", "one", "elf", `{"flash_size":16777216}`)
	for _, target := range []firmware.Target{{Release: "2.4.2"}, {Release: "xiaozhi@2.4.2"}} {
		items, next, err := f.Check(t.Context(), admin, target, selector.Selector{}, "", 10)
		if err != nil || next != "" || len(items) != 7 {
			t.Fatalf("%+v, error %v", items, err)
		}
		got := map[string]string{}
		for _, v := range items {
			got[v.Device] = v.Verdict + " " + v.Image
			for _, x := range v.Findings {
				got[v.Device] += " " + x.Code
			}
		}
		want := map[string]string{"a": "fit " + idOf(one) + " image_unknown", "b": "fit " + idOf(two) + " image_unknown", "c": "blocked  board",
			"d": "blocked " + idOf(one) + " check_unreadable image_unknown", "e": "blocked " + idOf(one) + " check_unreadable image_unknown",
			"f": "blocked " + idOf(one) + " check_unreadable image_unknown", "g": "blocked " + idOf(one) + " check_unreadable image_unknown"}
		if !maps.Equal(got, want) {
			t.Errorf("%+v: %q", target, got)
		}
	}
	counts, err := f.Count(t.Context(), admin, firmware.Target{Release: "2.4.2"}, selector.Selector{})
	if err != nil || counts.Devices != 7 || counts.Verdicts["fit"] != 2 || counts.Verdicts["blocked"] != 5 || counts.Findings["check_unreadable"] != 4 || counts.Findings["board"] != 1 {
		t.Errorf("%+v, error %v", counts, err)
	}
	f.mustAdd(t, other, true)
	for target, want := range map[firmware.Target]string{{}: "bad_request", {Image: idOf(one), Release: "2.4.2"}: "bad_request", {Release: "2.4.2"}: "bad_request", {Release: "2.4.3"}: "not_found",
		{Release: "other@2.4.2"}: "", {Release: "@"}: "not_found", {Image: idOf(one)}: "", {Image: "12"}: "bad_request"} {
		if _, _, err := f.Check(t.Context(), admin, target, selector.Selector{}, "", 10); codeOf(err) != want {
			t.Errorf("%+v: error %v", target, err)
		}
	}
	got, err := f.OfDevice(t.Context(), "a", idOf(two))
	if err != nil || got.Facts == nil || got.Facts.Slot != "ota_1" || got.Facts.ChipRevision != "1.2" || got.Facts.FlashSize != 16<<20 || got.Facts.Project != "xiaozhi" || got.Facts.Display != "320x240" ||
		len(got.Facts.Layout) != 3 || len(got.History) != 1 || got.Image != "" || got.Check.Verdict != "blocked" || got.Check.Findings[0].Code != "board" {
		t.Errorf("%+v, error %v", got, err)
	}
	if got, err = f.OfDevice(t.Context(), "d", ""); err != nil || got.Facts != nil || got.Check != nil {
		t.Errorf("%+v, error %v", got, err)
	}
	for _, wrong := range []string{"", " ", "three ", "thr\x1bee", "thr\u202eee", strings.Repeat("x", 65)} {
		if _, err := f.Edit(t.Context(), admin, idOf(one), api.FirmwareEdit{Boards: &[]string{wrong}}); codeOf(err) != "bad_request" {
			t.Errorf("board %q: error %v", wrong, err)
		}
	}
	boards := []string{"three"}
	if _, err := f.Edit(t.Context(), admin, idOf(one), api.FirmwareEdit{Boards: &boards}); err != nil {
		t.Error(err)
	}
	if got, err = f.OfDevice(t.Context(), "c", idOf(one)); err != nil || got.Check.Verdict != "fit" || got.Check.Findings[0].Code != "board_by_hand" {
		t.Errorf("%+v, error %v", got.Check, err)
	}
}

// TestSharedELF: of two images of one build, devices are shown with the newer one.
func TestSharedELF(t *testing.T) {
	f := newFleet(t, nil)
	f.mustAdd(t, image("one"), true)
	x := f.mustAdd(t, image("two"), true).Items[0]
	f.device(t, "a", "one", x.ELF, details)
	if got, err := f.OfDevice(t.Context(), "a", ""); err != nil || got.Image != x.ID || got.History[0].Image != x.ID {
		t.Errorf("%+v, error %v", got, err)
	}
}

// TestBoardTwice: an image that was given a board twice is no conflict with itself.
func TestBoardTwice(t *testing.T) {
	f := newFleet(t, nil)
	id := f.mustAdd(t, imagetest.Build{Version: "2.5.0"}.Image(), true).Items[0].ID
	if _, err := f.Edit(t.Context(), admin, id, api.FirmwareEdit{Boards: &[]string{"b", "b"}}); err != nil {
		t.Fatal(err)
	}
	if list, err := f.Release(t.Context(), "2.5.0"); err != nil || len(list) != 1 {
		t.Errorf("%+v, error %v", list, err)
	}
}

// TestReferences: an image is found by its id, by its build, and as one of a release, of which no two may be for one board.
func TestReferences(t *testing.T) {
	f := newFleet(t, nil)
	one := f.mustAdd(t, image("one"), true).Items[0]
	two := f.mustAdd(t, imagetest.Build{Version: "2.4.2", Literals: imagetest.Literals("two"), ELF: 2}.Image(), true).Items[0]
	same := f.mustAdd(t, imagetest.Build{Version: "2.6.0", Literals: imagetest.Literals("two"), ELF: 2}.Image(), true).Items[0]
	if x, err := f.Resolve(t.Context(), one.ID[:firmware.Digits]); err != nil || x.ID != one.ID || x.ELF != one.ELF {
		t.Errorf("%+v, error %v", x, err)
	}
	for elf, want := range map[string]string{one.ELF: one.ID, two.ELF: same.ID} { // of two images of one build, that which was added last
		if x, err := f.ByELF(t.Context(), elf); err != nil || x.ID != want {
			t.Errorf("%s: %+v, error %v", elf, x, err)
		}
	}
	if _, err := f.ByELF(t.Context(), "none"); !errors.Is(err, devices.ErrNotFound) {
		t.Errorf("error %v", err)
	}
	list, err := f.Release(t.Context(), "xiaozhi@2.4.2")
	if err != nil || len(list) != 2 || list[0].ID != two.ID || list[1].ID != one.ID {
		t.Errorf("%+v, error %v", list, err)
	}
	if _, err := f.Release(t.Context(), "2.4.3"); codeOf(err) != "not_found" {
		t.Errorf("error %v", err)
	}
	if _, err := f.Edit(t.Context(), admin, two.ID, api.FirmwareEdit{Boards: &[]string{"three", "one"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Release(t.Context(), "2.4.2"); codeOf(err) != "conflict" || !strings.Contains(err.Error(), "the board one") || !strings.Contains(err.Error(), one.ID[:firmware.Digits]) || !strings.Contains(err.Error(), two.ID[:firmware.Digits]) {
		t.Errorf("error %v", err)
	}
}

// TestJudge: what jobs learn of devices, and an OTA check of its device, from what is stored.
func TestJudge(t *testing.T) {
	barred := map[devices.ID]string{}
	f := newFleet(t, func(o *firmware.Options) {
		o.Bars = func(context.Context, []devices.ID) (map[devices.ID]string, error) { return barred, nil }
	})
	former := f.mustAdd(t, imagetest.Build{Chip: 9, Version: "2.4.1", Literals: imagetest.Literals("one"), ELF: 1}.Image(), true).Items[0]
	elsewhere := imagetest.Literals("one")
	elsewhere[1] = "https://other.example.com/xiaozhi/ota/"
	x := f.mustAdd(t, imagetest.Build{Chip: 9, Version: "2.5.0-rc1", Project: "other", Literals: elsewhere, ELF: 2}.Image(), true).Items[0]
	older := f.mustAdd(t, imagetest.Build{Chip: 9, Version: "2.2.0", Literals: imagetest.Literals("one"), ELF: 3}.Image(), true).Items[0]
	f.device(t, "a", "one", former.ELF, details)
	f.device(t, "b", "one", x.ELF, details)
	f.device(t, "c", "two", "unknown", details)
	for _, c := range []struct {
		allow []string
		want  string
	}{
		{nil, "blocked project no way back, already , blocked project other board no way back"},
		{[]string{"project"}, "blocked ota_url, already , blocked board other board no way back"},
		{[]string{"project", "ota_url"}, "fit , already , blocked board other board no way back"},
	} {
		list, err := f.Judge(t.Context(), x.ID, c.allow, f.core.views)
		var got []string
		for _, j := range list {
			text := string(j.Verdict) + " " + j.Code
			if j.OtherBoard {
				text += " other board"
			}
			if j.NoWayBack {
				text += " no way back"
			}
			if got = append(got, text); (j.Code == "") != (j.Text == "") {
				t.Errorf("%+v", j)
			}
		}
		if text := strings.Join(got, ", "); err != nil || text != c.want {
			t.Errorf("allow %q: %s, error %v; want %s", c.allow, text, err, c.want)
		}
	}
	all, v := []string{"project", "ota_url"}, &f.core.views[0]
	check := func(image string, allow []string, v *devices.View, body string, twice bool) preflight.Offer {
		t.Helper()
		o, err := f.JudgeCheck(t.Context(), image, allow, v, body, func(newest devices.DeviceImage) bool {
			if newest.ELF != former.ELF || newest.Details != details {
				t.Errorf("newest %+v", newest)
			}
			return twice
		})
		if err != nil || o.Details != details {
			t.Errorf("%+v, error %v", o, err)
		}
		return o
	}
	if o := check(x.ID, all, v, "", true); o.Verdict != preflight.Fit || o.ID != x.ID || o.ELF != x.ELF || o.Version != "2.5.0" || o.Force || !o.Foreign || o.Single || o.Size != x.Size {
		t.Errorf("%+v", o)
	}
	if o := check(older.ID, nil, v, "", true); o.Verdict != preflight.Fit || !o.Force || o.Foreign {
		t.Errorf("an older version: %+v", o)
	}
	if o := check(x.ID, all, v, "", false); o.Verdict != preflight.Waiting {
		t.Errorf("the first check of an image: %+v", o)
	}
	if o := check(x.ID, all, v, strings.Replace(details, `"revision":102`, `"revision":300`, 1), true); o.Code != "chip_revision" { // of another chip than at the last check
		t.Errorf("what the check says: %+v", o)
	}
	if o := check(x.ID, all, v, devices.UnreadableDetails, true); o.Code != "check_unreadable" {
		t.Errorf("a check that cannot be read: %+v", o)
	}
	old := *v
	old.Device.Firmware = "1.7.7"
	if o := check(x.ID, append(all, "version_too_old"), &old, "", true); o.Verdict != preflight.Fit || !o.Single {
		t.Errorf("before v1.8.0: %+v", o)
	}
	barred["a"] = "it fell back twice"
	if o := check(x.ID, all, v, "", true); o.Code != "barred" || !strings.Contains(o.Text, barred["a"]) {
		t.Errorf("barred: %+v", o)
	}
	if _, err := f.JudgeCheck(t.Context(), strings.Repeat("0", 64), nil, v, "", nil); codeOf(err) != "not_found" {
		t.Errorf("error %v", err)
	}
}

// TestReleaseNames: a project, and a version, may have an @.
func TestReleaseNames(t *testing.T) {
	f := newFleet(t, nil)
	f.mustAdd(t, imagetest.Build{Project: "a@b", Version: "2.4.2@c"}.Image(), true)
	for _, name := range []string{"a@b@2.4.2@c", "2.4.2@c"} {
		if _, _, err := f.Check(t.Context(), admin, firmware.Target{Release: name}, selector.Selector{}, "", 10); err != nil {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestDelete: an image that devices run, or ran last, is deleted by force alone.
func TestDelete(t *testing.T) {
	f := newFleet(t, nil)
	one := image("one")
	x := f.mustAdd(t, one, true).Items[0]
	f.device(t, "a", "one", x.ELF, details)
	f.core.notes = nil
	refused := func(text string) {
		t.Helper()
		if err := f.Delete(t.Context(), admin, x.ID, false); codeOf(err) != "conflict" || !strings.Contains(err.Error(), text) {
			t.Errorf("error %v", err)
		}
		f.core.noted(t, "delete_firmware "+x.ID+" conflict")
	}
	refused("run this image: 1; devices ran it last, and lose their way back: 0")
	if got, err := f.Get(t.Context(), admin, x.ID); err != nil || *got.Devices != 1 {
		t.Errorf("%+v, error %v", got, err)
	}
	f.device(t, "a", "one", "another", details)
	refused("run this image: 0; devices ran it last, and lose their way back: 1")
	if err := f.Delete(t.Context(), admin, x.ID, true); err != nil {
		t.Error(err)
	}
	f.core.noted(t, "delete_firmware "+x.ID+" ok")
	if _, _, err := f.Open(t.Context(), x.ID); codeOf(err) != "not_found" || len(files(t, f.Manager)) != 0 {
		t.Errorf("files %q, error %v", files(t, f.Manager), err)
	}
	objects, err := f.js.ObjectStore(t.Context(), "TEST_FIRMWARE")
	if err == nil {
		_, err = objects.GetInfo(t.Context(), x.ID)
	}
	if !errors.Is(err, jetstream.ErrObjectNotFound) {
		t.Errorf("error %v", err)
	}
}

// TestAway: without NATS or the database nothing is added, and images on the disk are served as long as the database knows them.
func TestAway(t *testing.T) {
	f := newFleet(t, nil)
	one := image("one")
	f.mustAdd(t, one, true)
	f.js.Conn().Close()
	if got := read(t, f.Manager, idOf(one)); !bytes.Equal(got, one) {
		t.Error("other bytes")
	}
	_, _, err := f.Add(t.Context(), admin, upload(image("two")))
	if codeOf(err) != "unavailable" || len(files(t, f.Manager)) != 1 {
		t.Errorf("files %q, error %v", files(t, f.Manager), err)
	}
}
