package preflight

import (
	"slices"
	"strings"
	"testing"

	"fleetd/internal/espimage"
)

const server = "https://fleet.example.com"

// fitDevice is a device that could get fitImage.
func fitDevice() Device {
	return Device{Admitted: true, Readable: true, SeenTwice: true, Board: "bread", Version: "2.4.1", ELF: "old", Chip: "esp32s3", Revision: 2, FlashSize: 16 << 20, Project: "xiaozhi", Slot: "ota_0",
		Table:   []espimage.Partition{{Label: "nvs", Type: 1, Subtype: 2}, {Label: "ota_0", Subtype: 16, Size: 1000}, {Label: "ota_1", Subtype: 17, Size: 500}, {Label: "assets", Type: 1, Subtype: 0x82, Size: 300}},
		Running: &Image{Image: &espimage.Image{Project: "xiaozhi", Version: "2.4.1", Boards: []string{"bread"}, URLs: []string{server + "/xiaozhi/ota/"}}, ELF: "old"}}
}

func fitImage() Image {
	return Image{Image: &espimage.Image{Chip: 9, MinRevision: 0, MaxRevision: 99, FlashSize: 16 << 20, Project: "xiaozhi", Version: "2.4.2", Size: 500, Boards: []string{"bread", "other"}, URLs: []string{server + "/xiaozhi/ota/"}}, ELF: "new"}
}

// TestJudge has every row of the table of findings.
func TestJudge(t *testing.T) {
	foreign := []string{"https://api.example.net/xiaozhi/ota/"}
	for _, c := range []struct {
		name    string
		change  func(d *Device, x *Image)
		verdict Verdict
		codes   string // those that a job may allow have a +
	}{
		{"nothing is wrong", func(*Device, *Image) {}, Fit, ""},
		{"it runs the image", func(d *Device, x *Image) { d.ELF, d.Chip = "new", "esp32" }, Already, ""},
		{"no ELF is known of either", func(d *Device, x *Image) { d.ELF, x.ELF = "", "" }, Fit, ""},
		{"it is not admitted", func(d *Device, x *Image) { d.Admitted = false }, Blocked, "not_admitted"},
		{"its check could not be read", func(d *Device, x *Image) { d.Readable, d.Table, d.Project = false, nil, "" }, Blocked, "check_unreadable"},
		{"its first check with what it runs", func(d *Device, x *Image) { d.SeenTwice = false }, Waiting, "first_check"},
		{"another chip", func(d *Device, x *Image) { d.Chip = "esp32" }, Blocked, "chip"},
		{"the ESP32 itself", func(d *Device, x *Image) { d.Chip, x.Chip = "esp32", 0 }, Fit, ""},
		{"a chip that is too old", func(d *Device, x *Image) { x.MinRevision = 3 }, Blocked, "chip_revision"},
		{"a chip that is too new", func(d *Device, x *Image) { d.Revision = 100 }, Blocked, "chip_revision"},
		{"any newer chip", func(d *Device, x *Image) { d.Revision, x.MaxRevision = 300, 0 }, Fit, ""},
		{"a smaller flash", func(d *Device, x *Image) { d.FlashSize = 8 << 20 }, Blocked, "flash_size"},
		{"a larger flash", func(d *Device, x *Image) { d.FlashSize = 32 << 20 }, Fit, ""},
		{"no slots", func(d *Device, x *Image) { d.Table = d.Table[3:] }, Blocked, "slot"},
		{"one slot", func(d *Device, x *Image) { d.Table = slices.Delete(d.Table, 2, 3) }, Blocked, "slot"},
		{"a factory image alone", func(d *Device, x *Image) {
			d.Table = []espimage.Partition{{Label: "factory", Size: 1000}, {Label: "assets", Type: 1, Subtype: 0x82, Size: 300}}
		}, Blocked, "slot"},
		{"a slot that is a byte too small", func(d *Device, x *Image) { x.Size = 501 }, Blocked, "slot"},
		{"the larger slot is the other one", func(d *Device, x *Image) { d.Slot, x.Size = "ota_1", 1000 }, Fit, ""},
		{"an unknown slot runs", func(d *Device, x *Image) { d.Slot, x.Size = "", 1000 }, Fit, ""},
		{"a factory image and slots", func(d *Device, x *Image) {
			d.Table = append([]espimage.Partition{{Label: "factory", Size: 1000}}, d.Table...)
		}, Fit, "factory_and_ota"},
		{"three slots", func(d *Device, x *Image) {
			d.Slot, d.Table = "ota_2", append(d.Table, espimage.Partition{Label: "ota_2", Subtype: 18, Size: 10})
			x.Size = 1000
		}, Fit, ""},
		{"another board", func(d *Device, x *Image) { x.Boards = []string{"other"} }, Blocked, "board"},
		{"no board", func(d *Device, x *Image) { x.Boards = nil }, Blocked, "board"},
		{"boards that somebody set", func(d *Device, x *Image) { x.Boards, x.ByHand = nil, []string{"bread"} }, Fit, "board_by_hand"},
		{"other boards that somebody set", func(d *Device, x *Image) { x.ByHand = []string{"other"} }, Blocked, "board board_by_hand"},
		{"a version with a v", func(d *Device, x *Image) { d.Version = "v2.4.2-dirty" }, Blocked, "version_aborts"},
		{"a version that is a hash", func(d *Device, x *Image) { d.Version = "abcdef0" }, Blocked, "version_aborts"},
		{"an empty part", func(d *Device, x *Image) { d.Version = "9..1" }, Blocked, "version_aborts"},
		{"a part that is too large", func(d *Device, x *Image) { d.Version = "2147483648" }, Blocked, "version_aborts"},
		{"a version that is read as its beginning", func(d *Device, x *Image) { d.Version = "2.4.2-dirty" }, Fit, ""},
		{"a version from git", func(d *Device, x *Image) { d.Version = "2.4.2-3-gabc" }, Fit, ""},
		{"a hash that begins with a digit", func(d *Device, x *Image) { d.Version = "1a2b3c4" }, Blocked, "version_too_old+"}, // it reads as 1
		{"no version", func(d *Device, x *Image) { d.Version = "" }, Blocked, "version_too_old+"},
		{"before v1.8.0", func(d *Device, x *Image) { d.Version = "1.7.7" }, Blocked, "version_too_old+"},
		{"v1.8.0", func(d *Device, x *Image) { d.Version = "1.8.0" }, Fit, ""},
		{"v1.x with the same version", func(d *Device, x *Image) { d.Version, x.Version = "1.9.4", "1.9.4" }, Blocked, "version_equal"},
		{"v2 with the same version", func(d *Device, x *Image) { x.Version = "2.4.1" }, Fit, ""},
		{"a lower version", func(d *Device, x *Image) { x.Version = "2.2.0" }, Fit, ""},
		{"a prerelease", func(d *Device, x *Image) { x.Version = "2.5.0-rc1" }, Fit, "prerelease"},
		{"another project", func(d *Device, x *Image) { x.Project = "other" }, Blocked, "project+ no_way_back"},
		{"v2 without assets", func(d *Device, x *Image) { d.Table = d.Table[:3] }, Blocked, "layout+ no_way_back"},
		{"v1 without assets", func(d *Device, x *Image) {
			d.Table, d.Version, x.Version, d.Running.Version = d.Table[:3], "1.9.0", "1.9.4", "1.9.0"
		}, Fit, ""},
		{"the layout of the image", func(d *Device, x *Image) { x.Layout = d.Table }, Fit, ""},
		{"a partition for crashes, which the image does not bring", func(d *Device, x *Image) {
			x.Layout = append(slices.Clone(d.Table), espimage.Partition{Label: "coredump", Type: 1, Subtype: 3, Size: 1})
		}, Fit, ""},
		{"a partition that is smaller", func(d *Device, x *Image) {
			x.Layout = []espimage.Partition{{Label: "nvs", Type: 1, Subtype: 2, Size: 1 << 20}, {Label: "assets", Type: 1, Subtype: 0x82, Size: 301}}
		}, Blocked, "layout+"},
		{"another server", func(d *Device, x *Image) { x.URLs = foreign }, Blocked, "ota_url+"},
		{"another port of this server", func(d *Device, x *Image) { x.URLs = []string{server + ":8443/xiaozhi/ota/"} }, Blocked, "ota_url+"},
		{"another spelling of this server", func(d *Device, x *Image) { x.URLs = []string{"https://Fleet.example.com:443/xiaozhi/ota/ws/"} }, Fit, ""},
		{"this server among others", func(d *Device, x *Image) { x.URLs = append(slices.Clone(foreign), x.URLs...) }, Fit, ""},
		{"another server, as now", func(d *Device, x *Image) { x.URLs, d.Running.URLs = foreign, foreign }, Fit, ""},
		{"another server, and nobody knows what it runs", func(d *Device, x *Image) { x.URLs, d.Running = foreign, nil }, Blocked, "ota_url+ image_unknown"},
		{"what it runs names another server, and the image this one", func(d *Device, x *Image) { d.Running.URLs = foreign }, Fit, "no_way_back"},
		{"no server", func(d *Device, x *Image) { x.URLs = nil }, Fit, "ota_url_unknown"},
		{"what it runs is not stored", func(d *Device, x *Image) { d.Running = nil }, Fit, "image_unknown"},
		{"what it runs is for another board", func(d *Device, x *Image) { d.Running.ByHand = []string{"other"} }, Fit, "no_way_back"},
	} {
		d, x := fitDevice(), fitImage()
		c.change(&d, &x)
		verdict, findings := Judge(&d, &x, server)
		var codes []string
		for _, f := range findings {
			code := string(f.Code)
			if f.Allow {
				code += "+"
			}
			codes = append(codes, code)
			if !strings.HasSuffix(f.Text, ".") || strings.Contains(f.Text, "%!") {
				t.Errorf("%s: %q is no sentence", c.name, f.Text)
			}
			if strings.Contains(f.Text, "allow "+string(f.Code)) != f.Allow {
				t.Errorf("%s: %q does not say what lifts it, or says what does not", c.name, f.Text)
			}
		}
		if got := strings.Join(codes, " "); verdict != c.verdict || got != c.codes {
			t.Errorf("%s: %s, %q; want %s, %q", c.name, verdict, got, c.verdict, c.codes)
		}
	}
}
