package storetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/espimage"
	"fleetd/internal/firmware"
	"fleetd/internal/store/firmwarestore"
)

func storedImage(n int, size int64) firmware.Image {
	image := firmware.Image{Image: espimage.Image{SHA256: [32]byte{byte(n)}, ELF: [32]byte{0xe, byte(n)}, Size: size, Chip: 9, MinRevision: 1, MaxRevision: 99, FlashSize: 16 << 20, Project: "xiaozhi", Version: "2.4.2",
		IDF: "v5.5", Built: start, SecureVersion: 3, Signature: espimage.SignatureV2, Boards: []string{"b"}, URLs: []string{"https://a/ota/"}, Merged: true, File: "f.bin",
		Layout: []espimage.Partition{{Label: "ota_0", Type: 0, Subtype: 16, Offset: 1, Size: 2}}}, Note: "note", AddedBy: "admin", AddedAt: start.Add(time.Duration(n) * time.Second)}
	return image
}

// testFirmware: rows of images come back as they were added, and all of an upload are added or none.
func testFirmware(t *testing.T, db Database) {
	s := openStore(t, db.URL)
	x := firmwarestore.New(s)
	allow := func(int, int64) error { return nil }
	one, two := storedImage(1, 100), storedImage(2, 50)
	if err := x.Add(t.Context(), []firmware.Image{one, two}, allow); err != nil {
		t.Fatal(err)
	}
	refusal := errors.New("no room")
	if err := x.Add(t.Context(), []firmware.Image{storedImage(3, 1)}, func(count int, bytes int64) error {
		if count != 2 || bytes != 150 {
			t.Errorf("%d images with %d bytes", count, bytes)
		}
		return refusal
	}); !errors.Is(err, refusal) {
		t.Errorf("error %v", err)
	}
	if err := x.Add(t.Context(), []firmware.Image{one}, allow); err != nil { // another node has added it meanwhile
		t.Error(err)
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
	if err := x.Delete(t.Context(), one.ID()); err != nil {
		t.Error(err)
	}
	for _, err := range []error{x.Delete(t.Context(), one.ID()), x.Edit(t.Context(), one.ID(), &note, nil)} {
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
				if err := x.Add(t.Context(), []firmware.Image{storedImage(1+3*n+i, 100)}, func(_ int, bytes int64) error {
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
