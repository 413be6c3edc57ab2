package firmware

import (
	"archive/zip"
	"bytes"
	"crypto/md5"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// The layout of an application image (ESP-IDF esp_app_format.h, esp_app_desc.h) and of a flash (esp_flash_partitions.h).
const (
	imageMagic        = 0xE9
	imageHeaderSize   = 24
	segmentHeaderSize = 8
	maxSegments       = 16
	descriptionMagic  = 0xABCD5432
	descriptionSize   = 256
	checksumSeed      = 0xEF
	checksumLine      = 16
	// chipESP32S3 is the chip_id of all profiles.
	chipESP32S3 = 9
	// chipRevision is that of their chip, major*100+minor.
	chipRevision = 2
	// tableAddress is where the partition table is in a flash.
	tableAddress = 0x8000
)

// Texts of a program by which other people's code finds its board and its server (main/mcp_server.cc:392, main/ota.cc:50).
const (
	boardLiteral = `"serverInfo":{"name":"`
	otaLiteral   = "/ota/\x00"
)

// program is the content of an application slot, as far as it shows on the wire. Programs never change.
type program struct {
	project, version, board, compiled, idf string
	elf                                    string // SHA-256 of the ELF file in hex: the identity of a build
	ota                                    string // URL of the OTA check that is built in; empty: the one of Options
}

// program is what a device of the profile leaves the factory with, in another version if one is given.
func (p *Profile) program(version string) *program {
	elf := derive(0, p.name, version)
	return &program{project: "xiaozhi", version: version, board: p.board, compiled: p.compiled, idf: p.idf, elf: hex.EncodeToString(elf[:])}
}

// Image makes an application image of a few hundred bytes, or of about ImageSize, with the board of the profile, in the layout of esptool. A device of
// the profile has the image of the profile's own version from the factory: elf_sha256 derives from profile and version. ota
// is the URL that the image would check.
func (p *Profile) Image(version, ota string) []byte {
	content := p.program(version)
	description := make([]byte, descriptionSize)
	binary.LittleEndian.PutUint32(description, descriptionMagic)
	date, clock, _ := strings.Cut(content.compiled, "T")
	copy(description[16:47], version)
	copy(description[48:79], content.project)
	copy(description[80:95], strings.TrimSuffix(clock, "Z"))
	copy(description[96:111], date)
	copy(description[112:143], content.idf)
	elf, _ := hex.DecodeString(content.elf)
	copy(description[144:], elf)
	segment := append(description, `{"protocolVersion":"2024-11-05","capabilities":{"tools":{}},`+boardLiteral+content.board+`","version":"`+"\x00"+ota+"\x00"...)
	for len(segment)%4 != 0 || len(segment) < p.ImageSize {
		segment = append(segment, 0)
	}
	image := make([]byte, imageHeaderSize, 1024)
	image[0], image[1], image[3], image[23] = imageMagic, 1, 4<<4, 1 // one segment, 16 MB of flash, a hash at the end
	binary.LittleEndian.PutUint16(image[12:], chipESP32S3)
	binary.LittleEndian.PutUint16(image[17:], 99) // highest chip revision: v0.99
	image = binary.LittleEndian.AppendUint32(image, 0x3C000020)
	image = binary.LittleEndian.AppendUint32(image, uint32(len(segment)))
	image = append(image, segment...)
	for len(image)%checksumLine != checksumLine-1 {
		image = append(image, 0)
	}
	image = append(image, checksum(checksumSeed, segment))
	hash := sha256.Sum256(image)
	return append(image, hash[:]...)
}

// MergedBinary puts an image into the content of a whole flash with the partition table of the profile, as esptool merge_bin
// does; the bootloader is its header alone.
func (p *Profile) MergedBinary(image []byte) []byte {
	flash := bytes.Repeat([]byte{0xFF}, int(p.slot().address))
	copy(flash, image[:imageHeaderSize])
	table := flash[tableAddress:tableAddress]
	for _, part := range p.partitions() {
		table = append(table, 0xAA, 0x50, part.kind, part.subtype)
		table = binary.LittleEndian.AppendUint32(table, part.address)
		table = binary.LittleEndian.AppendUint32(table, part.size)
		var label [20]byte
		copy(label[:], part.label)
		table = append(table, label[:]...)
	}
	sum := md5.Sum(table)
	table = append(append(table, 0xEB, 0xEB), bytes.Repeat([]byte{0xFF}, 14)...)
	_ = append(table, sum[:]...)
	return append(flash, image...)
}

// Release makes the zip that the project publishes for a board: its merged binary alone (scripts/build.py:67-81). It returns the
// name of the file, too.
func (p *Profile) Release(version, ota string) (name string, content []byte, err error) {
	var out bytes.Buffer
	z := zip.NewWriter(&out)
	w, err := z.Create("merged-binary.bin")
	if err == nil {
		_, err = w.Write(p.MergedBinary(p.Image(version, ota)))
	}
	err = errors.Join(err, z.Close())
	return "v" + version + "_" + p.board + ".zip", out.Bytes(), err
}

// readImage is esp_image_verify and what the program says of itself. The error is what the device finds wrong at the end of
// the download.
func readImage(raw []byte) (*program, error) {
	if len(raw) < imageHeaderSize+segmentHeaderSize+descriptionSize || raw[0] != imageMagic || raw[1] == 0 || raw[1] > maxSegments {
		return nil, errors.New("no application image")
	}
	if chip := binary.LittleEndian.Uint16(raw[12:]); chip != chipESP32S3 {
		return nil, fmt.Errorf("image for chip %d, this one is %d", chip, chipESP32S3)
	}
	if lowest, highest := binary.LittleEndian.Uint16(raw[15:]), binary.LittleEndian.Uint16(raw[17:]); chipRevision < lowest || highest > 0 && chipRevision > highest {
		return nil, fmt.Errorf("image for a chip revision from %d to %d, this one is %d", lowest, highest, chipRevision)
	}
	at, sum := imageHeaderSize, byte(checksumSeed)
	for range raw[1] {
		if len(raw)-at < segmentHeaderSize {
			return nil, errors.New("image ends within a segment")
		}
		length := binary.LittleEndian.Uint32(raw[at+4:])
		at += segmentHeaderSize
		if uint64(length) > uint64(len(raw)-at) {
			return nil, errors.New("image ends within a segment")
		}
		sum = checksum(sum, raw[at:at+int(length)])
		at += int(length)
	}
	if at += checksumLine - at%checksumLine; at > len(raw) || raw[at-1] != sum {
		return nil, errors.New("image has a wrong checksum")
	}
	if hash := sha256.Sum256(raw[:at]); raw[23] == 1 && !bytes.HasPrefix(raw[at:], hash[:]) {
		return nil, errors.New("image has a wrong SHA-256")
	}
	description := raw[imageHeaderSize+segmentHeaderSize:]
	if binary.LittleEndian.Uint32(description) != descriptionMagic {
		return nil, errors.New("image without a description")
	}
	text := func(from, to int) string {
		s, _, _ := bytes.Cut(description[from:to], []byte{0})
		return string(s)
	}
	next := &program{version: text(16, 48), project: text(48, 80), compiled: text(96, 112) + "T" + text(80, 96) + "Z", idf: text(112, 144),
		elf: hex.EncodeToString(description[144:176])}
	if _, after, found := bytes.Cut(raw, []byte(boardLiteral)); found {
		board, _, _ := bytes.Cut(after, []byte{'"'})
		next.board = string(board)
	}
	if before, _, found := bytes.Cut(raw, []byte(otaLiteral)); found {
		next.ota = string(before[bytes.LastIndexByte(before, 0)+1:]) + strings.TrimSuffix(otaLiteral, "\x00")
	}
	return next, nil
}

// checksum goes on with the XOR of an image's segments.
func checksum(sum byte, data []byte) byte {
	for _, c := range data {
		sum ^= c
	}
	return sum
}

// partition is an entry of a flash's table.
type partition struct {
	label         string
	kind, subtype byte
	address, size uint32
}

// partitions is partitions/v1/16m.csv or partitions/v2/16m.csv of the firmware.
func (p *Profile) partitions() []partition {
	head := []partition{{"nvs", 1, 2, 0x9000, 0x4000}, {"otadata", 1, 0, 0xD000, 0x2000}, {"phy_init", 1, 1, 0xF000, 0x1000}}
	if isBefore(p.version, "2.0.0") {
		return append(head, partition{"model", 1, 0x82, 0x10000, 0xF0000}, partition{"ota_0", 0, 0x10, 0x100000, 6 << 20}, partition{"ota_1", 0, 0x11, 0x700000, 6 << 20})
	}
	return append(head, partition{"ota_0", 0, 0x10, 0x20000, 0x3F0000}, partition{"ota_1", 0, 0x11, 0x410000, 0x3F0000}, partition{"assets", 1, 0x82, 0x800000, 8 << 20})
}

// slot is the first application slot; the other one has the same size.
func (p *Profile) slot() partition {
	list := p.partitions()
	return list[slices.IndexFunc(list, func(part partition) bool { return part.kind == 0 })]
}

// tableJSON is the table as the OTA check has it (main/boards/common/board.cc:139-157).
func (p *Profile) tableJSON() string {
	b := []byte("[")
	for i, part := range p.partitions() {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Appendf(b, `{"label":"%s","type":%d,"subtype":%d,"address":%d,"size":%d}`, part.label, part.kind, part.subtype, part.address, part.size)
	}
	return string(append(b, ']'))
}
