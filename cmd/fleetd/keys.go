package main

import (
	"context"
	"encoding/csv"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"fleetd/internal/apiclient"
)

const (
	importBatch = 200 // keys of a request: the longest fit into its 64 KiB
	maxKeyFile  = 1_000_000
)

type keysCmd struct {
	Import keysImportCmd `cmd:"" help:"Import serial numbers and keys of chips, whose hardware then admits itself."`
	List   keysListCmd   `cmd:"" help:"List the serial numbers and the devices that they prove; keys are never shown."`
	Remove keysRemoveCmd `cmd:"" help:"Remove the key of a serial number. Its device stays a member."`
}

type keysImportCmd struct {
	File string `arg:"" help:"CSV file with serial,key[,device] in each line; the key is eFuse KEY0, 64 hex digits. - reads standard input."`
	clientFlags
}

// Run checks the whole file before it sends the first line.
func (cmd *keysImportCmd) Run(ctx context.Context, a *app) error {
	chips, err := readKeys(cmd.File)
	if err != nil {
		return err
	}
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	for done := 0; done < len(chips); done += importBatch {
		if err := c.ImportChips(ctx, chips[done:min(done+importBatch, len(chips))]); err != nil {
			return fmt.Errorf("%d of %d keys are imported; the file can be imported again as it is: %w", done, len(chips), err)
		}
	}
	fmt.Fprintf(a.stdout, "%d keys imported\n", len(chips))
	return nil
}

// readKeys reads the file. Its errors name lines and never show what stands in them, which may be a key.
func readKeys(name string) ([]apiclient.Chip, error) {
	input := io.Reader(os.Stdin)
	if name != "-" {
		f, err := os.Open(name)
		if err != nil {
			return nil, failed("%w", err)
		}
		defer f.Close()
		input = f
	}
	lines := csv.NewReader(input)
	lines.Comment, lines.FieldsPerRecord, lines.TrimLeadingSpace, lines.ReuseRecord = '#', -1, true, true
	var chips []apiclient.Chip
	for {
		record, err := lines.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			var at *csv.ParseError
			if errors.As(err, &at) {
				return nil, failed("line %d is no CSV: %w", at.Line, at.Err)
			}
			return nil, failed("read the keys: %w", err)
		}
		line, _ := lines.FieldPos(0)
		chip, err := readKey(record)
		switch {
		case err != nil && len(chips) == 0 && strings.EqualFold(strings.TrimSpace(record[0]), "serial"):
			continue // a heading
		case err != nil:
			return nil, failed("line %d: %w", line, err)
		case len(chips) >= maxKeyFile:
			return nil, failed("more than %d keys; split the file", maxKeyFile)
		}
		chips = append(chips, chip)
	}
	if len(chips) == 0 {
		return nil, failed("there is no key in it; each line is serial,key[,device]")
	}
	return chips, nil
}

func readKey(record []string) (apiclient.Chip, error) {
	if len(record) < 2 || len(record) > 3 {
		return apiclient.Chip{}, fmt.Errorf("has %d fields; it must be serial,key[,device]", len(record))
	}
	chip := apiclient.Chip{Serial: strings.TrimSpace(record[0]), Key: strings.TrimSpace(record[1])}
	if len(record) == 3 {
		chip.Device = strings.TrimSpace(record[2])
	}
	if key, err := hex.DecodeString(chip.Key); err != nil || len(key) != 32 {
		return apiclient.Chip{}, errors.New("the second field is no key: 64 hex digits, the 32 bytes of eFuse block KEY0")
	}
	return chip, nil
}

type keysListCmd struct {
	JSON bool `name:"json" help:"Print one JSON object per line."`
	clientFlags
}

// Run prints the list.
func (cmd *keysListCmd) Run(ctx context.Context, a *app) error {
	c, err := cmd.client(a)
	if err != nil {
		return err
	}
	rows := [][]string{{"SERIAL", "DEVICE", "IMPORTED"}}
	for chip, err := range c.Chips(ctx) {
		if err != nil {
			return err
		}
		if cmd.JSON {
			line, err := json.Marshal(chip)
			if err != nil {
				return failed("write: %w", err)
			}
			if err := printJSONLine(a.stdout, line); err != nil {
				return err
			}
			continue
		}
		device := chip.Device
		if device == "" {
			device = "-"
		}
		rows = append(rows, []string{chip.Serial, device, ago(chip.ImportedAt, a.now())})
	}
	switch {
	case cmd.JSON:
		return nil
	case len(rows) == 1:
		fmt.Fprintln(a.stdout, "no keys are listed")
		return nil
	}
	return table(a.stdout, "", rows)
}

type keysRemoveCmd struct {
	Serial string `arg:"" help:"Serial number."`
	clientFlags
}

// Run removes one.
func (cmd *keysRemoveCmd) Run(ctx context.Context, a *app) error {
	return a.change(ctx, cmd.clientFlags, (*apiclient.Client).RemoveChip, cmd.Serial, "removed; a device that it proved stays a member")
}
