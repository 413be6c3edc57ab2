package espimage

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"fleetd/internal/espimage/imagetest"
)

const most = 32 << 20

// inspect inspects a file, and returns the bytes of its images.
func inspect(t testing.TB, file []byte) (*File, [][]byte) {
	t.Helper()
	var kept [][]byte
	found, err := Inspect(bytes.NewReader(file), int64(len(file)), most, func() (io.Writer, func(*Image) error, error) {
		var out bytes.Buffer
		return &out, func(image *Image) error {
			if image != nil {
				kept = append(kept, out.Bytes())
			}
			return nil
		}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found, kept
}

func codes(faults []Fault) string {
	var out []string
	for _, f := range faults {
		out = append(out, f.Code)
	}
	return strings.Join(out, " ")
}

func TestApplication(t *testing.T) {
	raw := imagetest.Build{Chip: 9, Literals: imagetest.Literals("bread-compact-wifi"), Segments: [][]byte{bytes.Repeat([]byte{7}, 3*window)}}.Image()
	for name, file := range map[string][]byte{"alone": raw, "with bytes behind it": append(slices.Clone(raw), bytes.Repeat([]byte{0xff}, 5000)...), "in a flash": imagetest.Merged(raw), "in a zip": imagetest.Zip(t, map[string][]byte{"xiaozhi.bin": raw})} {
		t.Run(name, func(t *testing.T) {
			found, kept := inspect(t, file)
			if !found.IsFit() || len(found.Images) != 1 || !bytes.Equal(kept[0], raw) {
				t.Fatalf("%+v", found)
			}
			image := found.Images[0]
			if image.SHA256 != sha256.Sum256(raw) || image.Size != int64(len(raw)) || image.Chip.String() != "esp32s3" || image.MinRevision != 100 || image.MaxRevision != 199 || image.FlashSize != 16<<20 {
				t.Errorf("%+v", image)
			}
			if image.Project != "xiaozhi" || image.Version != "2.4.2" || image.IDF != "v5.5.1" || !image.Built.Equal(time.Date(2026, 11, 3, 13, 2, 11, 0, time.UTC)) || image.ELF[31] != 31 || image.SecureVersion != 3 {
				t.Errorf("%+v", image)
			}
			if !slices.Equal(image.Boards, []string{"bread-compact-wifi"}) || !slices.Equal(image.URLs, []string{"https://api.example.com/xiaozhi/ota/"}) {
				t.Errorf("boards %q, URLs %q", image.Boards, image.URLs)
			}
			if image.Merged != (name == "in a flash") || image.Merged && (len(image.Layout) != 4 || !image.Layout[1].IsSlot() || image.Layout[1].Label != "ota_0" || image.Layout[1].Size != 0x100000) {
				t.Errorf("merged %v, layout %+v", image.Merged, image.Layout)
			}
		})
	}
}

// A build with a factory partition writes its application there, and leaves the slots empty.
func TestFactory(t *testing.T) {
	one, two := imagetest.Build{Literals: imagetest.Literals("board-1")}.Image(), imagetest.Build{Literals: imagetest.Literals("board-2")}.Image()
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"a file that ends before ota_0": {imagetest.Factory(one, nil, false), "board-1"},
		"an empty ota_0":                {imagetest.Factory(one, nil, true), "board-1"},
		"an empty ota_0 in a zip":       {imagetest.Zip(t, map[string][]byte{"merged-binary.bin": imagetest.Factory(one, nil, true)}), "board-1"},
		"both":                          {imagetest.Factory(one, two, true), "board-2"},
		"both in a zip":                 {imagetest.Zip(t, map[string][]byte{"merged-binary.bin": imagetest.Factory(one, two, true)}), "board-2"},
		"ota_0 alone":                   {imagetest.Factory(nil, two, true), "board-2"},
	} {
		found, kept := inspect(t, c.file)
		if !found.IsFit() || len(kept) != 1 || !slices.Equal(found.Images[0].Boards, []string{c.want}) || !found.Images[0].Merged || len(found.Images[0].Layout) != 5 {
			t.Errorf("%s: %+v", name, found)
		}
	}
	if found, _ := inspect(t, imagetest.Factory(nil, nil, true)); codes(found.AllFaults()) != FaultNoApp {
		t.Errorf("neither: %+v", found)
	}
}

// Literals are found wherever they are, also where one piece that is read ends.
func TestLiteralsAtABorder(t *testing.T) {
	for _, shift := range []int{0, 1, 20, 40, 60, 100} {
		padding := strings.Repeat("x", window-descSize-shift)
		found, _ := inspect(t, imagetest.Build{Literals: append([]string{padding}, imagetest.Literals("otto-robot")...)}.Image())
		if image := found.Images[0]; !slices.Equal(image.Boards, []string{"otto-robot"}) || len(image.URLs) != 1 {
			t.Errorf("%d bytes before the border: boards %q, URLs %q", shift, image.Boards, image.URLs)
		}
	}
}

func TestSignatures(t *testing.T) {
	raw := imagetest.Build{}.Image()
	v1 := append(slices.Clone(raw), make([]byte, signatureV1)...)
	v2 := append(append(append(slices.Clone(raw), bytes.Repeat([]byte{0xff}, signatureAlign-len(raw)%signatureAlign)...), signatureV2...), make([]byte, signatureAlign-2)...)
	for want, file := range map[Signature][]byte{SignatureV1: v1, SignatureV2: v2, SignatureNone: raw} {
		found, kept := inspect(t, file)
		if image := found.Images[0]; image.Signature != want || image.SHA256 != sha256.Sum256(file) || !bytes.Equal(kept[0], file) {
			t.Errorf("%q: %+v", want, image)
		}
	}
}

// A bit that is flipped anywhere in an image is noticed.
func TestFlippedBits(t *testing.T) {
	raw := imagetest.Build{Literals: imagetest.Literals("esp-box-3"), Segments: [][]byte{make([]byte, 64), make([]byte, 128)}}.Image()
	for at := range raw {
		damaged := slices.Clone(raw)
		for bit := range 8 {
			damaged[at] ^= 1 << bit
			if found, _ := inspect(t, damaged); found.IsFit() {
				t.Errorf("byte %d, bit %d: %+v", at, bit, found.Images[0])
			}
			damaged[at] ^= 1 << bit
		}
	}
}

func TestFaults(t *testing.T) {
	raw := imagetest.Build{}.Image()
	change := func(do func(file []byte)) []byte {
		file := slices.Clone(raw)
		do(file)
		return file
	}
	pack := make([]byte, 12+44+100)
	pack[0] = 1
	binary.LittleEndian.PutUint32(pack[8:], 44+100)
	for name, c := range map[string]struct {
		file []byte
		want string
	}{
		"nothing":                 {nil, FaultUnknown},
		"a text":                  {[]byte(strings.Repeat("not firmware ", 100)), FaultUnknown},
		"half of it":              {raw[:len(raw)/2], FaultTruncated},
		"without its hash":        {raw[:len(raw)-hashSize], FaultTruncated},
		"255 segments":            {change(func(f []byte) { f[1] = 255 }), FaultSegments},
		"no segments":             {change(func(f []byte) { f[1] = 0 }), FaultSegments},
		"an endless segment":      {change(func(f []byte) { binary.LittleEndian.PutUint32(f[headerSize+4:], 0xffffffff) }), FaultTruncated},
		"an odd segment":          {change(func(f []byte) { f[headerSize+4]++ }), FaultSegments},
		"no hash":                 {change(func(f []byte) { f[23] = 0 }), FaultHash},
		"no description":          {change(func(f []byte) { f[descOffset] = 0 }), FaultDesc},
		"no ELF":                  {change(func(f []byte) { clear(f[descOffset+144 : descOffset+176]) }), FaultDesc},
		"the hash of another one": {change(func(f []byte) { f[len(f)-1]++ }), FaultHash},
		"another checksum":        {change(func(f []byte) { f[len(f)-hashSize-1]++ }), FaultChecksum + " " + FaultHash},
		"an unknown chip":         {imagetest.Build{Chip: 77}.Image(), FaultChip},
		"the version latest":      {imagetest.Build{Version: "latest"}.Image(), FaultAborts},
		"a large part":            {imagetest.Build{Version: "2147483648"}.Image(), FaultAborts},
		"an empty part":           {imagetest.Build{Version: "2..1"}.Image(), FaultAborts},
		"a v":                     {imagetest.Build{Version: "v2.4.2"}.Image(), FaultAborts},
		"no version":              {imagetest.Build{Version: "\x00"}.Image(), FaultAborts},
		"an old version":          {imagetest.Build{Version: "1.7.9"}.Image(), FaultTooOld},
		"a pack of assets":        {pack, FaultAssets},
		"33 MiB":                  {make([]byte, 33<<20), FaultTooLarge},
		"a flash without an app":  {imagetest.Merged(nil), FaultNoApp},
		"a damaged table":         {func() []byte { f := imagetest.Merged(raw); f[tableOffset+12]++; return f }(), FaultTable},
		"a zip bomb":              {imagetest.Zip(t, map[string][]byte{"a.bin": make([]byte, 40<<20)}), FaultTooLarge},
		"a zip of two bombs":      {imagetest.Zip(t, map[string][]byte{"a.bin": make([]byte, 20<<20), "b.bin": make([]byte, 20<<20)}), FaultTooLarge},
		"a zip without images":    {imagetest.Zip(t, map[string][]byte{"README.md": raw}), FaultNoApp},
		"a zip with a bad image":  {imagetest.Zip(t, map[string][]byte{"a.bin": raw, "b.bin": raw[:200]}), FaultTruncated},
		"a name of 300 bytes":     {imagetest.Zip(t, map[string][]byte{strings.Repeat("a", 296) + ".bin": raw}), FaultZip},
		"a damaged zip":           {imagetest.Zip(t, map[string][]byte{"a.bin": raw})[:200], FaultZip},
	} {
		found, _ := inspect(t, c.file)
		if got := codes(found.AllFaults()); got != c.want {
			t.Errorf("%s: faults %q, want %q", name, got, c.want)
		}
	}
}

// The rest of a file is named and thrown away; a fault of one image of a zip leaves the others.
func TestRest(t *testing.T) {
	one, two := imagetest.Build{Literals: imagetest.Literals("board-1")}.Image(), imagetest.Build{Literals: imagetest.Literals("board-2")}.Image()
	found, kept := inspect(t, imagetest.Zip(t, map[string][]byte{"a/one.bin": one, "two.bin": imagetest.Merged(two), "assets.bin": []byte("something"), "z.bin": one[:300]}))
	if len(kept) != 2 || len(found.Images) != 2 || found.Images[0].File != "one.bin" || found.Images[1].Boards[0] != "board-2" {
		t.Errorf("%d images: %+v", len(found.Images), found)
	}
	if len(found.Dropped) != 1 || !strings.HasPrefix(found.Dropped[0], "assets.bin: ") {
		t.Errorf("dropped %q", found.Dropped)
	}
	if got := codes(found.AllFaults()); got != FaultTruncated || found.Faults[0].File != "z.bin" {
		t.Errorf("%+v", found.Faults)
	}
}

// The zip of a build directory has what belongs to a flash beside the application. What cannot be read keeps nothing else from being named.
func TestZipOfABuild(t *testing.T) {
	raw := imagetest.Build{}.Image()
	build := map[string][]byte{"build/bootloader/bootloader.bin": imagetest.Bootloader(), "build/partition_table/partition-table.bin": imagetest.Merged(nil)[tableOffset:][:tableSize],
		"build/ota_data_initial.bin": bytes.Repeat([]byte{0xff}, 0x2000), "build/xiaozhi.elf": raw}
	found, _ := inspect(t, imagetest.Zip(t, build))
	if got := codes(found.AllFaults()); got != FaultNoApp {
		t.Errorf("without its application: %q", got)
	}
	build["build/xiaozhi.bin"] = raw
	found, kept := inspect(t, imagetest.Zip(t, build))
	var dropped []string
	for _, what := range found.Dropped {
		name, _, _ := strings.Cut(what, ":")
		dropped = append(dropped, name)
	}
	if !found.IsFit() || len(kept) != 1 || !slices.Equal(dropped, []string{"bootloader.bin", "ota_data_initial.bin", "partition-table.bin"}) {
		t.Errorf("%+v", found)
	}
	long := strings.Repeat("c", 300) + ".bin"
	found, _ = inspect(t, imagetest.Zip(t, map[string][]byte{"a.bin": make([]byte, 40<<20), "b.bin": raw[:200], long: raw, "d.bin": raw[:20], "e.bin": raw}))
	var faults []string
	for _, f := range found.AllFaults() {
		faults = append(faults, f.File[:5]+" "+f.Code)
	}
	if want := []string{"a.bin " + FaultTooLarge, "b.bin " + FaultTruncated, "ccccc " + FaultZip, "d.bin " + FaultTruncated}; !slices.Equal(faults, want) || len(found.Images) != 1 {
		t.Errorf("%q", faults)
	}
}

// Nothing is kept of an image that has no end, and an error of the store is not one of the file.
func TestKeep(t *testing.T) {
	raw := imagetest.Build{}.Image()
	ended := 0
	keep := func() (io.Writer, func(*Image) error, error) {
		return io.Discard, func(image *Image) error {
			if image != nil {
				t.Error("a truncated image is kept")
			}
			ended++
			return nil
		}, nil
	}
	if _, err := Inspect(bytes.NewReader(raw[:200]), 200, most, keep); err != nil || ended != 1 {
		t.Errorf("%v, ended %d times", err, ended)
	}
	full := errors.New("the disk is full")
	keep = func() (io.Writer, func(*Image) error, error) {
		return writer(func([]byte) (int, error) { return 0, full }), func(*Image) error { return nil }, nil
	}
	if _, err := Inspect(bytes.NewReader(raw), int64(len(raw)), most, keep); !errors.Is(err, full) {
		t.Errorf("%v", err)
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// The memory does not depend on the file.
func TestMemory(t *testing.T) {
	random := make([]byte, most)
	r := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(random); i += 8 {
		binary.LittleEndian.PutUint64(random[i:], r.Uint64())
	}
	image := imagetest.Build{Segments: [][]byte{random[:most-4096]}}.Image()
	const name, end = 46, 22 // bytes of a zip's record of a file without a name, and of its end
	count := (most - end) / name
	names := slices.Grow(slices.Clone(zipMagic), most)
	names = append(names, bytes.Repeat(append([]byte("PK\x01\x02"), make([]byte, name-4)...), count)...)
	names = append(binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(append(names, "PK\x05\x06\x00\x00\x00\x00"...), uint16(count)), uint16(count)), 0, 0, 0, 0, 4, 0, 0, 0, 0, 0)
	for name, file := range map[string][]byte{"random": random, "an image": image, "a flash": imagetest.Merged(image[:len(image)-1<<20]), "a zip of names": names} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		if _, err := Inspect(bytes.NewReader(file), int64(len(file)), most, nil); err != nil {
			t.Error(err)
		}
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 1<<20 {
			t.Errorf("%s: %d bytes allocated", name, used)
		}
	}
}

// A field of the highest revision that is not set has all bits.
func TestRevisions(t *testing.T) {
	raw := imagetest.Build{}.Image()
	raw[17], raw[18] = 0xff, 0xff
	if found, _ := inspect(t, raw); found.Images[0].Revisions() != "from 1.0" {
		t.Errorf("%s", found.Images[0].Revisions())
	}
}

func TestVersion(t *testing.T) {
	for text, want := range map[string]string{"2.4.2": "[2 4 2]", "": "[]", "2.4.2-dirty": "[2 4 2]", "2.4.2-3-gabc": "[2 4 2]", "1a2b3c4": "[1]", " +2. 3": "[2 3]", "-1": "[-1]", "2.": "[2]", "2147483647": "[2147483647]",
		"v2.4.2": "aborts", "abcdef0": "aborts", "9..1": "aborts", "2147483648": "aborts", ".": "aborts", "2..": "aborts", "+-1": "aborts", "latest": "aborts", "-": "aborts"} {
		parts, ok := Version(text)
		got := strings.Replace(fmt.Sprint(parts), "<nil>", "[]", 1)
		if !ok {
			got = "aborts"
		}
		if got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	for _, c := range []struct {
		own, offered string
		newer        bool
	}{{"2.4.2", "2.4.3", true}, {"2.4.2", "2.4.2", false}, {"2.4.2", "2.4.2.1", true}, {"2.4.2.1", "2.4.2", false}, {"2.5.0-rc1", "2.5.0", false}, {"2.10", "2.9", false}, {"", "0", true}} {
		own, _ := Version(c.own)
		offered, _ := Version(c.offered)
		if got := Newer(own, offered); got != c.newer {
			t.Errorf("%s, offered %s: newer %v", c.own, c.offered, got)
		}
	}
}

func FuzzInspect(f *testing.F) {
	raw := imagetest.Build{Chip: 9, Literals: imagetest.Literals("bread-compact-wifi"), Segments: [][]byte{make([]byte, 64)}}.Image()
	for _, seed := range [][]byte{nil, raw, raw[:100], imagetest.Merged(raw), imagetest.Factory(raw, nil, true), imagetest.Zip(f, map[string][]byte{"a.bin": raw, "b.bin": []byte("x")})} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		found, kept := inspect(t, file)
		if len(found.Images)+len(found.Faults) == 0 {
			t.Fatal("neither an image nor a fault")
		}
		for i, image := range found.Images {
			if int64(len(kept[i])) != image.Size || sha256.Sum256(kept[i]) != image.SHA256 || image.Size > int64(most) {
				t.Fatalf("%+v was kept as %d bytes", image, len(kept[i]))
			}
			if len(image.Faults) > 0 {
				continue
			}
			again, _ := inspect(t, kept[i]) // what is kept is an image by itself
			if len(again.Images) != 1 || again.Images[0].SHA256 != image.SHA256 || len(again.AllFaults()) > 0 {
				t.Fatalf("read again: %+v", again)
			}
		}
	})
}
