// Package imagetest makes small firmware files that are valid, in the exact layout of esptool and of the project's releases.
package imagetest

import (
	"archive/zip"
	"bytes"
	"cmp"
	"crypto/md5"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"
	"testing"
)

// Layout of an image and of a flash, as internal/espimage reads them; written again, so that a wrong offset there is noticed.
const (
	imageMagic    = 0xe9
	headerSize    = 24
	descSize      = 256
	descMagic     = 0xabcd5432
	checksumSeed  = 0xef
	checksumAlign = 16
	tableOffset   = 0x8000
)

// Build is what an image is made of. The zero value is a fit image.
type Build struct {
	Version, Project string
	Chip             uint16
	Literals         []string
	Segments         [][]byte // behind the one with the description
	ELF              byte     // the first byte of the ELF's SHA-256
}

// Image builds an image as esptool does.
func (b Build) Image() []byte {
	desc := make([]byte, descSize)
	binary.LittleEndian.PutUint32(desc, descMagic)
	binary.LittleEndian.PutUint32(desc[4:], 3)
	for at, value := range map[int]string{16: cmp.Or(b.Version, "2.4.2"), 48: cmp.Or(b.Project, "xiaozhi"), 80: "13:02:11", 96: "Nov  3 2026", 112: "v5.5.1"} {
		copy(desc[at:], value)
	}
	for i := range 32 {
		desc[144+i] = byte(i)
	}
	desc[144] = b.ELF
	program := desc
	for _, literal := range b.Literals {
		program = append(append(program, literal...), 0)
	}
	for len(program)%4 != 0 {
		program = append(program, 0)
	}
	segments := append([][]byte{program}, b.Segments...)
	out := make([]byte, headerSize)
	out[0], out[1], out[3] = imageMagic, byte(len(segments)), 4<<4
	binary.LittleEndian.PutUint16(out[12:], b.Chip)
	binary.LittleEndian.PutUint16(out[15:], 100)
	binary.LittleEndian.PutUint16(out[17:], 199)
	out[23] = 1
	sum := byte(checksumSeed)
	for _, segment := range segments {
		out = binary.LittleEndian.AppendUint32(out, 0x3c000020)
		out = binary.LittleEndian.AppendUint32(out, uint32(len(segment)))
		out = append(out, segment...)
		for _, c := range segment {
			sum ^= c
		}
	}
	for len(out)%checksumAlign != checksumAlign-1 {
		out = append(out, 0)
	}
	out = append(out, sum)
	hash := sha256.Sum256(out)
	return append(out, hash[:]...)
}

// Literals are those of a board, as the compiler leaves them.
func Literals(board string) []string {
	return []string{`{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},"serverInfo":{"name":"` + board + `","version":"`, "https://api.example.com/xiaozhi/ota/"}
}

// entry is an entry of a partition table.
func entry(label string, kind, subtype byte, offset, size uint32) []byte {
	out := append([]byte{0xaa, 0x50}, kind, subtype)
	out = binary.LittleEndian.AppendUint32(out, offset)
	out = binary.LittleEndian.AppendUint32(out, size)
	return append(append(out, label...), make([]byte, 20-len(label))...)
}

// Merged puts an image into the content of a flash, as esptool merge_bin does.
func Merged(image []byte) []byte {
	return append(flash(entry("nvs", 1, 2, 0x9000, 0x4000), entry("ota_0", 0, 0x10, 0x20000, 0x100000), entry("ota_1", 0, 0x11, 0x120000, 0x100000), entry("assets", 1, 0x82, 0x220000, 0x100000)), image...)
}

// Factory puts an image into a flash that has a factory partition beside the slots: there the build writes its application. slot is what ota_0 has;
// nil: the file has no bytes of it, or erased ones if something follows.
func Factory(image, slot []byte, assets bool) []byte {
	file := append(flash(entry("nvs", 1, 2, 0x9000, 0x4000), entry("factory", 0, 0, 0x20000, 0x10000), entry("ota_0", 0, 0x10, 0x30000, 0x10000), entry("ota_1", 0, 0x11, 0x40000, 0x10000), entry("assets", 1, 0x82, 0x50000, 0x10000)), image...)
	if slot != nil || assets {
		file = append(append(file, bytes.Repeat([]byte{0xff}, 0x30000-len(file))...), slot...)
	}
	if assets {
		file = append(append(file, bytes.Repeat([]byte{0xff}, 0x50000-len(file))...), "assets"...)
	}
	return file
}

// flash is the content of a flash up to its first application.
func flash(entries ...[]byte) []byte {
	flash := bytes.Repeat([]byte{0xff}, 0x20000)
	copy(flash, Bootloader())
	table := slices.Concat(entries...)
	sum := md5.Sum(table)
	copy(flash[tableOffset:], slices.Concat(table, []byte{0xeb, 0xeb}, bytes.Repeat([]byte{0xff}, 14), sum[:]))
	return flash
}

// Bootloader is a bootloader of ESP-IDF: an image without the description of an application.
func Bootloader() []byte {
	image := Build{}.Image()
	image[headerSize+8] = 0x50 // esp_bootloader_desc_t
	return image[:len(image)-len(image)%4]
}

// Zip packs files, in order of name.
func Zip(t testing.TB, files map[string][]byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := zip.NewWriter(&out)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		f, err := w.Create(name)
		if err == nil {
			_, err = f.Write(files[name])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}
