from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("shop", "0003_packings")]

    operations = [
        migrations.CreateModel(
            name="Robot",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=80, unique=True)),
            ],
        ),
        migrations.AddField(
            model_name="packing",
            name="confirmed",
            field=models.BooleanField(default=False, editable=False),
        ),
    ]
