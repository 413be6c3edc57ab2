package espimage

import (
	"bytes"
	"crypto/md5"
	"encoding/binary"
	"slices"
)

// Partition is an entry of the partition table (esp_partition_info_t).
type Partition struct {
	Label         string
	Type, Subtype uint8
	Offset, Size  int64 // bytes
}

// Types and subtypes of partitions.
const (
	typeApp        = 0
	typeData       = 1
	subtypeEfuse   = 0x05 // after otadata, phy, nvs, coredump and nvs_keys
	subtypeFactory = 0x00
	subtypeOTA0    = 0x10 // ota_0; ota_15 is 0x1f
	subtypeOTALast = 0x1f
)

// IsSlot reports whether upgrades can be written to it.
func (p *Partition) IsSlot() bool {
	return p.Type == typeApp && p.Subtype >= subtypeOTA0 && p.Subtype <= subtypeOTALast
}

// IsFactory reports whether it is the app that no upgrade replaces.
func (p *Partition) IsFactory() bool { return p.Type == typeApp && p.Subtype == subtypeFactory }

// IsContent reports whether it holds data that comes with a build, such as fonts and sounds.
func (p *Partition) IsContent() bool { return p.Type == typeData && !p.isState() }

// isState reports whether it holds what a device writes by itself: settings, the choice of a slot, calibration, crashes.
func (p *Partition) isState() bool { return p.Type == typeData && p.Subtype <= subtypeEfuse }

const (
	tableOffset = 0x8000
	tableSize   = 0xc00
	entrySize   = 32
	maxFlash    = 128 << 20
)

var (
	entryMagic = []byte{0xaa, 0x50}
	md5Magic   = append([]byte{0xeb, 0xeb}, bytes.Repeat([]byte{0xff}, 14)...)
)

// readTable reads a partition table. Its MD5, if it has one, must be right.
func readTable(raw []byte) ([]Partition, error) {
	var table []Partition
	for at := 0; at+entrySize <= len(raw); at += entrySize {
		entry := raw[at : at+entrySize]
		switch {
		case bytes.HasPrefix(entry, entryMagic):
			p := Partition{Type: entry[2], Subtype: entry[3], Offset: int64(binary.LittleEndian.Uint32(entry[4:])), Size: int64(binary.LittleEndian.Uint32(entry[8:])), Label: text(entry[12:28])}
			if p.Offset+p.Size > maxFlash {
				return nil, fault(FaultTable, "The partition %q ends behind %d MiB, the largest flash. Build the file again.", p.Label, maxFlash>>20)
			}
			table = append(table, p)
		case bytes.HasPrefix(entry, md5Magic):
			if sum := md5.Sum(raw[:at]); !bytes.Equal(sum[:], entry[16:]) {
				return nil, fault(FaultTable, "The MD5 of the partition table is wrong. The file is damaged: download it again.")
			}
			return table, nil
		default: // erased flash ends a table without an MD5
			if bytes.Count(entry, []byte{0xff}) == entrySize && len(table) > 0 {
				return table, nil
			}
			return nil, fault(FaultTable, "The partition table has an entry that is none. The file is damaged: download it again.")
		}
	}
	return nil, fault(FaultTable, "The partition table has no end. The file is damaged: download it again.")
}

// appsOf returns the partitions that the application of a flash may be in.
func appsOf(table []Partition) (apps []*Partition) {
	for _, subtype := range []uint8{subtypeOTA0, subtypeFactory} {
		if at := slices.IndexFunc(table, func(p Partition) bool { return p.Type == typeApp && p.Subtype == subtype }); at >= 0 {
			apps = append(apps, &table[at])
		}
	}
	return apps
}
