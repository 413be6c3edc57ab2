package storetest

import (
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/espimage"
	"fleetd/internal/firmware"
	"fleetd/internal/store"
	"fleetd/internal/store/firmwarestore"
)

// imageCheck is an OTA check with a build, at a time after start.
func imageCheck(id devices.ID, elf, details string, after time.Duration) devices.Check {
	return devices.Check{Device: id, Facts: devices.Facts{Board: "board", Firmware: "v" + elf, ELF: elf, CheckedAt: start.Add(after)}, Details: details}
}

// changes collects the changes of images.
type changes struct {
	mu   sync.Mutex
	list []devices.ImageChange
}

func (c *changes) add(change devices.ImageChange) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list = append(c.list, change)
}

func (c *changes) take() (texts []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range c.list {
		texts = append(texts, fmt.Sprint(x.From.ELF, ">", x.To.ELF, " ", x.To.Cause))
	}
	c.list = nil
	return texts
}

// testImages: the history of a device's images has a row for each image, in the order in which checks arrived, and a check that says
// nothing new changes no row.
func testImages(t *testing.T, db Database) {
	var seen changes
	s := openStore(t, db.URL, store.OnImage(seen.add), store.Clock(func() time.Time { return start.Add(time.Hour) }))
	images := firmwarestore.New(s)
	db.add(t, "x")
	const d1, d2 = `{"flash_size":1}`, `{"flash_size":2}`
	for _, step := range []struct {
		what    string
		check   devices.Check
		want    string // the history, newest first
		twice   bool
		details string
		changes []string
	}{
		{"the first check", imageCheck("x", "a", d1, 1), "a", false, d1, nil},
		{"the same again", imageCheck("x", "a", d1, 2), "a", true, d1, nil},
		{"a third one", imageCheck("x", "a", d1, 3), "a", true, d1, nil},
		{"other hardware", imageCheck("x", "a", d2, 4), "a", true, d2, nil},
		{"another image", imageCheck("x", "b", d2, 5), "b foreign,a", false, d2, []string{"a>b foreign"}},
		{"a check that came late", imageCheck("x", "c", d2, 4), "b foreign,a", false, d2, nil},
		{"a check without an image", imageCheck("x", "", d1, 6), "b foreign,a", false, d2, nil},
		{"a check without details", imageCheck("x", "c", "", 7), "b foreign,a", false, d2, nil},
		{"one whose body was not read", imageCheck("x", "b", devices.UnreadableDetails, 8), "b foreign,a", true, devices.UnreadableDetails, nil},
		{"the first image again", imageCheck("x", "a", d2, 9), "a foreign,b foreign,a", false, d2, []string{"b>a foreign"}},
	} {
		step.check.CheckedAt = start.Add(time.Duration(step.check.CheckedAt.Sub(start)) * time.Minute)
		s.SaveFacts(step.check)
		settle(t, s)
		history, err := images.History(t.Context(), "x")
		var got string
		for i, h := range history {
			if i > 0 {
				got += ","
			}
			got += h.ELF
			if h.Cause != "" {
				got += " " + string(h.Cause)
			}
		}
		if err != nil || got != step.want || history[0].SeenTwice != step.twice || history[0].Details != step.details || history[0].Version != "v"+history[0].ELF {
			t.Errorf("%s: %q, %+v, error %v", step.what, got, history[0], err)
		}
		if got := seen.take(); !slices.Equal(got, step.changes) {
			t.Errorf("%s: changes %q, want %q", step.what, got, step.changes)
		}
		newest, err := images.Newest(t.Context(), []devices.ID{"x", "y"})
		if err != nil || len(newest) != 1 || newest["x"] != history[0] {
			t.Errorf("%s: newest %+v, error %v", step.what, newest, err)
		}
	}
	if n, err := images.Running(t.Context(), []string{"a", "b", "z"}); err != nil || n["a"] != 1 || n["b"] != 0 {
		t.Errorf("running %v, error %v", n, err)
	}
	if n, err := images.Former(t.Context(), "b"); err != nil || n != 1 {
		t.Errorf("%d had b before, error %v", n, err)
	}
	if n, err := images.Former(t.Context(), "a"); err != nil || n != 0 {
		t.Errorf("%d had a before, error %v", n, err)
	}
	for i := range devices.MaxImages + 5 {
		s.SaveFacts(imageCheck("x", fmt.Sprint("n", i), d1, 20*time.Minute+time.Duration(i)*time.Second))
		settle(t, s)
	}
	history, err := images.History(t.Context(), "x")
	if err != nil || len(history) != devices.MaxImages || history[0].ELF != fmt.Sprint("n", devices.MaxImages+4) {
		t.Errorf("%d rows, the newest %+v, error %v", len(history), history[0], err)
	}
}

// testLateImages: of two checks that wait together, the earlier one's details count if the later one says nothing of the image.
func testLateImages(t *testing.T, db Database) {
	var seen changes
	s := openStore(t, db.URL, store.OnImage(seen.add), store.Clock(func() time.Time { return start.Add(time.Hour) }))
	db.add(t, "x", "zz-hold")
	release := holdWriter(t, s)
	s.SaveFacts(imageCheck("x", "a", `{}`, time.Minute))
	later := imageCheck("x", "", "", 2*time.Minute)
	later.Firmware = ""
	s.SaveFacts(later)
	release()
	settle(t, s)
	history, err := firmwarestore.New(s).History(t.Context(), "x")
	if err != nil || len(history) != 1 || history[0].ELF != "a" {
		t.Errorf("history %+v, error %v", history, err)
	}
}

func storedImage(n int, size int64) firmware.Image {
	image := firmware.Image{Image: espimage.Image{SHA256: [32]byte{byte(n)}, ELF: [32]byte{0xe, byte(n)}, Size: size, Chip: 9, MinRevision: 1, MaxRevision: 99, FlashSize: 16 << 20, Project: "xiaozhi", Version: "2.4.2",
		IDF: "v5.5", Built: start, SecureVersion: 3, Signature: espimage.SignatureV2, Boards: []string{"b"}, URLs: []string{"https://a/ota/"}, Merged: true, File: "f.bin",
		Layout: []espimage.Partition{{Label: "ota_0", Type: 0, Subtype: 16, Offset: 1, Size: 2}}}, Note: "note", AddedBy: "admin", AddedAt: start.Add(time.Duration(n) * time.Second)}
	return image
}

// AddImage adds the row of an image, unless it is there.
func AddImage(t testing.TB, s *store.Store, id string) {
	t.Helper()
	image := storedImage(1, 1)
	if _, err := hex.Decode(image.SHA256[:], []byte(id)); err != nil {
		t.Fatal(err)
	}
	if _, err := firmwarestore.New(s).Add(t.Context(), []firmware.Image{image}, func(int, int64) error { return nil }); err != nil {
		t.Fatal(err)
	}
}

// testFirmware: rows of images come back as they were added, and all of an upload are added or none.
func testFirmware(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	x := firmwarestore.New(s)
	allow := func(int, int64) error { return nil }
	one, two := storedImage(1, 100), storedImage(2, 50)
	if added, err := x.Add(t.Context(), []firmware.Image{one, two}, allow); err != nil || len(added) != 2 {
		t.Fatalf("%+v, error %v", added, err)
	}
	refusal := errors.New("no room")
	if _, err := x.Add(t.Context(), []firmware.Image{storedImage(3, 1)}, func(count int, bytes int64) error {
		if count != 2 || bytes != 150 {
			t.Errorf("%d images with %d bytes", count, bytes)
		}
		return refusal
	}); !errors.Is(err, refusal) {
		t.Errorf("error %v", err)
	}
	if added, err := x.Add(t.Context(), []firmware.Image{one}, allow); err != nil || len(added) != 0 { // another node has added it meanwhile
		t.Errorf("%+v, error %v", added, err)
	}
	list, err := x.Images(t.Context())
	if err != nil || len(list) != 2 || fmt.Sprintf("%+v", list[0]) != fmt.Sprintf("%+v", two) || fmt.Sprintf("%+v", list[1]) != fmt.Sprintf("%+v", one) {
		t.Errorf("%+v, error %v; want %+v", list, err, two)
	}
	note, boards := "other\x00", []string{"c", "d"}
	if err := x.Edit(t.Context(), one.ID(), &note, &boards); err != nil {
		t.Error(err)
	}
	if list, err = x.Images(t.Context()); err != nil || list[1].Note != "other\uFFFD" || !slices.Equal(list[1].ByHand, boards) {
		t.Errorf("%+v, error %v", list, err)
	}
	if err := x.Edit(t.Context(), one.ID(), nil, &[]string{}); err != nil {
		t.Error(err)
	}
	if list, err = x.Images(t.Context()); err != nil || list[1].Note != "other\uFFFD" || list[1].ByHand != nil {
		t.Errorf("%+v, error %v", list, err)
	}
	if err := x.Delete(t.Context(), one.ID(), func() error { return nil }); err != nil {
		t.Error(err)
	}
	for _, err := range []error{x.Delete(t.Context(), one.ID(), func() error { return nil }), x.Edit(t.Context(), one.ID(), &note, nil)} {
		if !errors.Is(err, devices.ErrNotFound) {
			t.Errorf("error %v", err)
		}
	}
}

// testFirmwareRoom: uploads on several nodes at once do not exceed the storage together.
func testFirmwareRoom(t *testing.T, db Database) {
	full := errors.New("full")
	var wait sync.WaitGroup
	const nodes, room = 4, 250
	for n := range nodes {
		x := firmwarestore.New(openStore(t, db.URL))
		wait.Go(func() {
			for i := range 3 {
				if _, err := x.Add(t.Context(), []firmware.Image{storedImage(1+3*n+i, 100)}, func(_ int, bytes int64) error {
					if bytes+100 > room {
						return full
					}
					return nil
				}); err != nil && !errors.Is(err, full) {
					t.Error(err)
				}
			}
		})
		if !db.Postgres { // one process has a file
			break
		}
	}
	wait.Wait()
	if n := db.Count(t, `SELECT count(*) FROM firmware`); n != room/100 {
		t.Errorf("%d images", n)
	}
}
